"""Checkpoints of a run: saving, restoring, retention and checksums."""
