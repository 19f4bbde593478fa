"""Whether two jobs on one card do more together than one after the other. Pure."""
