"""Probes: what a model's mixers and residual streams do, measured during training."""
