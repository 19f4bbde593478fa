"""A fake NVML: a small C library that answers from a script, for machines without a card."""
