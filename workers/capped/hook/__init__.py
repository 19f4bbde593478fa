"""What a capped interpreter imports when it starts; this folder stands first in its PYTHONPATH."""
