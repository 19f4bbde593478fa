"""The arms of a tuning: processes that compute (train, or multiply matrices) only during their
turns.
"""
