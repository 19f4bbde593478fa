"""The only folder of the head that imports Ray."""
