"""The verb `burn`: three phases of validation, and a verdict on each worker, node and phase."""
