"""Measures on this machine what each setting of a training brings: the verb `tune`."""
