"""The only room of the head that imports ray."""
