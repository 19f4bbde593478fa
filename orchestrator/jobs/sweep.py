"""From an entry with a sweep to its jobs, with stable ids. Pure."""
