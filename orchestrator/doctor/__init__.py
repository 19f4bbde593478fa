"""The verb `doctor`: checks of machines and clusters, and the report of what they find."""
