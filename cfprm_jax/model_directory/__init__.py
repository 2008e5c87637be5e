"""The files of a model directory but its weights: read within bounds and checked by schemas."""
