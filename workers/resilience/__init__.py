"""`workers.resilient`: a function that takes a batch size first, called with the largest that fits."""
