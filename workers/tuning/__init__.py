"""The arms of a tuning: processes that train or multiply while it is their turn, and wait in
between.
"""
