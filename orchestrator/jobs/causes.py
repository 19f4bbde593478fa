"""How an attempt ended, and whether and where it is started again. Pure."""
