"""Job files as frozen models, and what is wrong with them, in words with file, line and key. Pure."""
