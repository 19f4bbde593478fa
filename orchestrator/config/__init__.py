"""cluster.yaml as frozen models: reading, checking, scaling, and what is known of each card."""
