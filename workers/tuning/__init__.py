"""The arms of a tuning: processes that train or multiply for a moment when they are asked to, and
wait in between.
"""
