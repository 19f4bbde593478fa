"""Facts about this machine: its hardware, its software and its processes."""
