"""The queue: which record follows from what has been recorded and what is seen. Pure."""
