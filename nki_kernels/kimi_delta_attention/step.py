"""Computes one token of Kimi Delta Attention per sequence, for decoding: each row of a state has its decay.

    S <- Diag(exp(g)) S    u = beta (v - S^T k)    S <- S + k u^T    o = scale S^T q

Source: arXiv:2510.26692. The work is that of `nki_kernels.gated_delta_rule_step`. Reads of the state take
exp(g) . k and exp(g) . q, and a line of the state on its partition is decayed by its own number.
"""

from delta_trn.nki_kernels.gated_delta_rule_step import example as scalar_example
from delta_trn.nki_kernels.gated_delta_rule_step import run_groups
from delta_trn.nki_kernels.language import nki, nl
from delta_trn.nki_kernels.tiles import uniforms


@nki.jit
def kimi_delta_attention_step(q, k, v, g, beta, state, scale, l2norm):
    """Computes one token of Kimi Delta Attention.

    Args:
        g           [B, HV, K], K at least 2
        the others  as those of `gated_delta_rule_step`

    Returns:
        o           [B, HV, V] in v's dtype
        new_state   [B, HV, K, V] float32
    """
    o = nl.ndarray(v.shape, dtype=v.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray(state.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    run_groups(q, k, v, g, beta, state, scale, l2norm, o, new_state)
    return o, new_state


def example(**shape):
    """Returns (kernel, arguments) for the simulator's report: those of the gated delta rule's, but g."""
    q, k, v, g, *rest = scalar_example(**shape)[1]
    return kimi_delta_attention_step, (q, k, v, -uniforms(*g.shape, q.shape[-1]), *rest)
