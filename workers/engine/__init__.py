"""One worker: runs steps, survives out-of-memory, tells how it is."""
