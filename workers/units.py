"""The sizes of a MiB and a GiB in bytes. Formats nothing."""

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
