"""cluster.yaml as frozen models: reading, checking, and facts about cards."""
