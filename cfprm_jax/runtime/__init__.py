"""The machine and its processes: devices, signals, caches, disk, and multi-process runs."""
