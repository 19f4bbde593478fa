"""One Snapshot, several ways to look at it."""
