"""The work of the train command: options, inputs, the loop, metrics and the run directory."""
