"""Which job starts on which card, and why the others wait. Pure."""
