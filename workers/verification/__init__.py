"""Whether what a device computed is right: Freivalds' test, bitwise repeat, and
when to do either.
"""
