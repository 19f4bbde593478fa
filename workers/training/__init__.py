"""Training in micro-batches: the effective batch stays, its parts may change size at any time.

No engine, no Ray.
"""
