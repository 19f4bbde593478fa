"""The verbs: arguments in, exit code out."""
