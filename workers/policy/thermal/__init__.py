"""The thermal governor: temperature in, duty out."""
