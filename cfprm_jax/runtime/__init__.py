"""The machine and its processes: devices, signals, caches, disk, and how several processes agree."""
