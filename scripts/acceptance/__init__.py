"""The checks of `gpu_acceptance.py`, one group in each file.

Each check measures in child processes, and then judges the measurements without a device.
"""
