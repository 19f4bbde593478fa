"""One loop that runs parts of the size that fits in memory, and tries again smaller."""
