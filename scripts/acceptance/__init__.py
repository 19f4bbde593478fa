"""The checks of `gpu_acceptance.py`, one group a file.

Each measures in processes of its own, and judges what was measured apart from that, without a
device.
"""
