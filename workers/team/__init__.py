"""One training shared by several slots: they divide its samples or the blocks of its model."""
