"""Devices: where memory is capped, allocated and measured."""
