"""One training run: its model, optimizer, step, loop, evaluation and samples."""
