"""Computes Kimi Delta Attention, the delta rule with a decay per channel: forward and gradients.

The gated delta rule's kernels drive these, and import `chunk`: so this package imports nothing.
"""
