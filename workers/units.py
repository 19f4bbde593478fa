"""A MiB and a GiB in bytes. Does not format sizes."""

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
