"""What scores are worth: grading, Best-of-N, intervals, tables."""
