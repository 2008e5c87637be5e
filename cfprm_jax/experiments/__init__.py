"""The paper's experiments: the grid of runs, their laboratory, and the reports."""
