"""Checkpoints: what they hold, how they are written whole, and the folder of a run."""
