"""Benchmarks that compare the product with something else in the same run.

`scripts/bench.py` starts them.
"""
