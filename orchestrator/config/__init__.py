"""cluster.yaml as frozen models: reading, checking, and what is known of each card."""
