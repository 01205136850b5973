"""NKI kernels as operators of TorchNeuron, PyTorch's own device on Trn2 and Trn3 ("neuron" tensors).

There a kernel may be called as it is, but a graph that torch.compile(backend="neuron") captures cannot see
such a call. `torch_neuronx.nki_op` makes an operator of a function whose arguments have types, which are the
operator's schema, and looks through the function while it compiles. So there is one function per kernel here,
and nothing in it but the call. Differentiating stays where it is for every backend, above the adapters.

Sources: AWS's guide to NKI kernels in torch-neuronx 2.14 (Neuron SDK 2.33), and torch.library's rules for
types of arguments.
"""

# no annotations import: the types below must be types when nki_op reads them

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from delta_trn.nki_kernels.delta_residual import delta_residual_bwd, delta_residual_fwd
from delta_trn.nki_kernels.gated_delta_rule_bwd import gated_delta_rule_bwd
from delta_trn.nki_kernels.gated_delta_rule_fwd import gated_delta_rule_fwd
from delta_trn.nki_kernels.gated_delta_rule_step import gated_delta_rule_step
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd


def _rule_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    scale: float, l2norm: bool, given: bool, every: int, C: int, lanes: int, width: int,
) -> list[Tensor]:  # fmt: skip
    return _listed(
        gated_delta_rule_fwd(
            q, k, v, g, beta, initial_state, scale, l2norm, given, every, C, lanes, width
        )
    )  # fmt: skip


def _rule_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, do: Tensor, dstate: Tensor | None,
    initial_state: Tensor | None, states: Tensor | None, scale: float, l2norm: bool, given: bool,
    started: bool, every: int, C: int, lanes: int, width: int,
) -> list[Tensor]:  # fmt: skip
    return _listed(
        gated_delta_rule_bwd(
            q, k, v, g, beta, do, dstate, initial_state, states, scale, l2norm, given, started, every, C,
            lanes, width,
        )
    )  # fmt: skip


def _rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, l2norm: bool
) -> list[Tensor]:
    return _listed(gated_delta_rule_step(q, k, v, g, beta, state, scale, l2norm))


def _residual_forward(x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None) -> list[Tensor]:
    return _listed(delta_residual_fwd(x, k, v, beta, k_eps))


def _residual_backward(
    dout: Tensor, x: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_eps: float | None
) -> list[Tensor]:
    return _listed(delta_residual_bwd(dout, x, k, v, beta, k_eps))


def _convolution_forward(
    x: Tensor, weight: Tensor, position: Tensor | None, packed: bool, prefix: Tensor | None = None,
    continued: bool = False,
) -> list[Tensor]:  # fmt: skip
    return _listed(short_convolution_fwd(x, weight, position, packed, prefix, continued))


def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, position: Tensor | None, packed: bool,
    prefix: Tensor | None = None, continued: bool = False,
) -> list[Tensor]:  # fmt: skip
    return _listed(short_convolution_bwd(dy, x, weight, position, packed, prefix, continued))


def _norm_forward(x: Tensor, z: Tensor | None, weight: Tensor, eps: float, gated: bool) -> list[Tensor]:
    return _listed(gated_rms_norm_fwd(x, z, weight, eps, gated))


def _norm_backward(
    dy: Tensor, x: Tensor, z: Tensor | None, weight: Tensor, eps: float, gated: bool
) -> list[Tensor]:
    return _listed(gated_rms_norm_bwd(dy, x, z, weight, eps, gated))


LAUNCHERS = (
    (gated_delta_rule_fwd, _rule_forward),
    (gated_delta_rule_bwd, _rule_backward),
    (gated_delta_rule_step, _rule_step),
    (delta_residual_fwd, _residual_forward),
    (delta_residual_bwd, _residual_backward),
    (short_convolution_fwd, _convolution_forward),
    (short_convolution_bwd, _convolution_backward),
    (gated_rms_norm_fwd, _norm_forward),
    (gated_rms_norm_bwd, _norm_backward),
)


def missing() -> str | None:
    """Why kernels cannot run on "neuron" tensors here; None if they can."""
    try:
        found = import_module("torch_neuronx")
    except ModuleNotFoundError:
        return "needs torch_neuronx 2.14 and nki, from AWS Neuron's package index, on Trn2 or Trn3"
    if not hasattr(found, "nki_op"):
        return "needs torch_neuronx 2.14 (Neuron SDK 2.33): this one has no nki_op"
    return None


def launch(kernel: Any, args: tuple[Any, ...]) -> Any:
    """The kernel's output, or its outputs, through its operator."""
    operators = _operators()
    for i, (known, _) in enumerate(LAUNCHERS):
        if known is kernel:
            found = operators[i](*args)
            return found[0] if len(found) == 1 else tuple(found)
    raise LookupError(f"kernel {kernel} has no launcher; add one to {__name__}.LAUNCHERS")


@cache
def _operators() -> list[Callable[..., list[Tensor]]]:
    nki_op = import_module("torch_neuronx").nki_op
    return [nki_op(f"delta_trn::nki{f.__name__}", mutates_args={})(f) for _, f in LAUNCHERS]


def _listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]
