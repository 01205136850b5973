"""Computes a layer's mixer in one kernel, and its gradients in another:
convolution, rule and gated norm.
"""

from delta_trn.nki_kernels.gated_delta_layer import bwd, fwd


def example(backward=0, **shape):
    """Returns (kernel, arguments) for the simulator's report; backward=1 for the gradients."""
    return (bwd if backward else fwd).example(**shape)
