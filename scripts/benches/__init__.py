"""Benchmarks of the product against something else in the same run.

Started by `scripts/bench.py`.
"""
