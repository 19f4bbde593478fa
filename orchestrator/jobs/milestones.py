"""Which members of a sweep go on at a milestone (ASHA that pauses, median). Pure."""
