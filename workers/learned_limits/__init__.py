"""Where earlier runs ended up, and which of it fits a worker."""
