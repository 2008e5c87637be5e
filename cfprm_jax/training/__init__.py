"""Training: mesh and shardings, optimizer, train step, checkpoints, metrics, evaluation, and the loop over them."""
