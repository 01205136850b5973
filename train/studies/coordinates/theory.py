"""What muP says about each tensor of a model: the power of width with which it may grow.

Tensor Programs V, arXiv:2203.03466, appendix D.1; for Gated DeltaNet arXiv:2606.04048. Sums of d terms follow
one of two laws: terms that share a sign add up (the power 1), others average out (1/2). Between the two a
tensor that is divided by d, or a head's readout, has a range of powers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CONSTANT = (0.0, 0.0)
_BETWEEN = (-0.5, 0.0)


@dataclass(frozen=True)
class Tensors:
    """The ranges of the powers of width of a tensor's size before training and of its change."""

    meaning: str
    size: tuple[float, float] = CONSTANT
    change: tuple[float, float] = CONSTANT


MODULE = Tensors("what a module of anybody's model computes")
TENSORS: Mapping[str, Tensors] = {
    "hidden": Tensors("residual stream after the last block"),
    "q": Tensors("q after convolution and SiLU, before normalization"),
    "k": Tensors("k after convolution and SiLU, before normalization"),
    "v": Tensors("v after convolution and SiLU"),
    "q_unit": Tensors("q normalized, times sqrt(K)"),
    "k_unit": Tensors("k normalized, times sqrt(K)"),
    "gate_decay": Tensors("W_a x + dt_bias"),
    "gate_beta": Tensors("W_b x"),
    "alpha": Tensors("decay exp(g)"),
    "beta": Tensors("write strength"),
    "state": Tensors("state after the last token, times sqrt(K)"),
    # SiLU gives q and k a positive mean, so that q.k = Theta(1) instead of Theta(1 / sqrt(K)): S^T q starts
    # between the two laws, and so do the gradients of W_q and W_k, between 1 / d and d^-3/2
    "o": Tensors("S^T q, before its norm", size=_BETWEEN, change=_BETWEEN),
    "o_norm": Tensors("o after its norm, before the gate"),
    "mixer": Tensors("what the token mixer adds to the residual stream"),
    "mlp": Tensors("what the MLP adds to the residual stream"),
    # before training logits average out; what learning adds is aligned, but only in the few entries of the
    # vocabulary that do come next
    "logits": Tensors("logits of the whole vocabulary", size=_BETWEEN, change=_BETWEEN),
    "logit_next": Tensors("logit of the token that comes next", size=_BETWEEN),
    # a token adds up with itself, and with others as far as they share a mean
    "own_q": Tensors("W_q x0, x0 the input before training", change=_BETWEEN),
    "own_k": Tensors("W_k x0", change=_BETWEEN),
    "own_v": Tensors("W_v x0", change=_BETWEEN),
    "own_decay": Tensors("W_a x0", change=_BETWEEN),
    "own_beta": Tensors("W_b x0", change=_BETWEEN),
    # The paper's rule for SGD takes their gradients to average out over a head's channels. That stops within
    # a few steps, so both fail: results/2026-11-21_cpu_coordinate-check has the measurement.
    "dt_bias": Tensors("the decay's bias"),
    "A_log": Tensors("logarithm of the decay's rate"),
    # Deep Delta Learning's writes (`models.residual`): k has norm 1 and v grows like sqrt(m), which is
    # divided out here; what the stream holds along k is a sum of d terms
    "write_beta": Tensors("beta of Deep Delta Learning's writes"),
    "write_value": Tensors("v of the writes, over sqrt(m)"),
    "write_along": Tensors("k^T X, over sqrt(m)", size=_BETWEEN, change=_BETWEEN),
    "written": Tensors("what a write adds to the residual stream"),
}


def theory_of(tensor: str) -> Tensors:
    """Returns the ranges for a tensor of TENSORS, or else for a module of that name."""
    return TENSORS.get(tensor, MODULE)
