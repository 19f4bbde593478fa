"""The default policy: one number between two bounds."""
