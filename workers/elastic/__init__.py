"""The retry loop: runs a part of a step at a size that fits in memory, and retries it smaller."""
