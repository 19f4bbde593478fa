"""What `doctor` checks, how it asks, and how it tells."""
