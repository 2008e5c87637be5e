"""Sharding: the mapping of logical axes to mesh axes, for training, inference and planning."""
