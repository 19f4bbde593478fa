"""`workers.resilient`: calls a function with the largest batch size that fits."""
