"""What each worker of a shared card may hold now."""
