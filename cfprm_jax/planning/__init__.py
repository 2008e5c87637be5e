"""What a training configuration needs on an accelerator that is not there: XLA's compilers run on any machine."""
