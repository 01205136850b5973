"""Computes a layer's mixer in one kernel, and its gradients in another: convolution, rule and gated norm."""

from delta_trn.nki_kernels.gated_delta_layer import bwd, fwd, projected, projected_bwd


def example(backward=0, d=0, **shape):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients.

    With d, forward projects hidden states of that width, and backward makes their gradient.
    """
    if d:
        return (projected_bwd if backward else projected).example(d=d, **shape)
    return (bwd if backward else fwd).example(**shape)
