"""An NVML of one's own: a small C library that answers out of a script, for machines without a card."""
