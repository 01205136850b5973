"""Several processes: who holds which part of a model, of a batch and of a sequence."""
