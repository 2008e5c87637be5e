"""The paper's experiments: the grid of runs, the laboratory that they run in, and what comes out of them."""
