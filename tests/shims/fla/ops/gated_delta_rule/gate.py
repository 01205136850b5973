"""The gate of Gated DeltaNet in PyTorch: g = -exp(A_log) softplus(g_raw + dt_bias)."""

from torch import Tensor
from torch.nn.functional import softplus


def naive_gdn_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """g [..., HV], A_log and dt_bias [HV]."""
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * softplus(g)


fused_gdn_gate = naive_gdn_gate
