"""Commands to a running run: the socket of its head, and how others send to it."""
