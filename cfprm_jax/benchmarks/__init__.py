"""Benchmarks of step scores: from published files and a PRM to a directory of results."""
