"""The verb `burn`: three phases of validation, each a run, and a verdict on every worker, node and
phase.
"""
