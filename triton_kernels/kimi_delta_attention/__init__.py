"""Chunks of Kimi Delta Attention, and their gradients;
the scans and the step are the gated delta rule's.
"""

from delta_trn.triton_kernels.kimi_delta_attention import bwd, fwd

__all__ = ["bwd", "fwd"]
