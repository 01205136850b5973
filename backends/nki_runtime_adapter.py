"""Runs an NKI kernel on XLA's tensors, on TorchNeuron's, or on the CPU's in a simulator.

    xla       the kernel is recorded in the lazy graph and compiled with it
    neuron    the kernel is an operator of TorchNeuron, PyTorch's own device on Trn2 and Trn3
    cpu       the kernel runs under `nki.simulate`: our simulator, or AWS's where its nki package is
              installed

On TorchNeuron a kernel could be called directly, but a graph that torch.compile(backend="neuron")
captures cannot see such a call. `torch_neuronx.nki_op` makes an operator of a function, reads its
schema from the types of the arguments, and looks through the function while it compiles. So
`make_launcher` makes a function of each kernel, with nothing in it but the call.

Sources: AWS's guide to NKI kernels in torch-neuronx 2.14 (Neuron SDK 2.33), and torch.library's
rules for types of arguments.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from delta_trn.backends.checks import BackendRefusal, is_checking
from delta_trn.nki_kernels import plan
from delta_trn.nki_kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd
from delta_trn.nki_kernels.delta_residual import delta_residual_bwd, delta_residual_fwd
from delta_trn.nki_kernels.gated_delta_layer.bwd import gated_delta_layer_bwd
from delta_trn.nki_kernels.gated_delta_layer.fwd import gated_delta_layer_fwd
from delta_trn.nki_kernels.gated_delta_rule_bwd import gated_delta_rule_bwd
from delta_trn.nki_kernels.gated_delta_rule_fwd import gated_delta_rule_fwd
from delta_trn.nki_kernels.gated_delta_rule_step import gated_delta_rule_step
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.kimi_delta_attention.bwd import kimi_delta_attention_bwd
from delta_trn.nki_kernels.kimi_delta_attention.fwd import kimi_delta_attention_fwd
from delta_trn.nki_kernels.language import RUNTIME, nki
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
_counts: list[list[int]] = []  # instructions of kernels, while somebody counts them


def run(kernel: Any, *args: Any) -> Any:
    """Returns a kernel's output, or its outputs, on the device of its first tensor.

    None stands for a tensor that a call does not have and its kernel does not read. The kernel gets
    a tensor of one number there: with None it would be compiled again at every call (nki 0.2 and
    0.3), and no public kernel takes one tensor in two places.
    """
    device = args[0].device
    full = [stand_in(i, device) if x is None else x for i, x in enumerate(args)]
    if device.type == "xla":  # where tensors have no strides
        return kernel(*full)
    if device.type != "cpu":
        dense = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in full)
        return launch(kernel, dense) if device.type == "neuron" else kernel(*dense)
    outputs = simulate(kernel, *(to_array(x) if isinstance(x, Tensor) else x for x in full))
    return tuple(map(to_tensor, outputs)) if isinstance(outputs, tuple) else to_tensor(outputs)


@cache
def stand_in(place: int, device: torch.device) -> Tensor:
    """Returns a tensor of one number, another one for each place:
    on XLA a parameter of the graph.
    """
    return torch.zeros(1).to(device)


def simulate(kernel: Any, *args: Any) -> Any:
    """Returns the kernel's outputs on NumPy arrays.

    The target is Trn1 unless Neuron's own variable names one: without it AWS's simulator takes the
    rules of Trn3.
    """
    target = os.environ.get(TARGET)
    os.environ[TARGET] = target or "trn1"
    try:
        if not _counts:
            return nki.simulate(kernel)(*args)
        from nki_simulator import record  # which a chip's environment need not have

        run = record(kernel, *args, trace=False)
        _counts[-1].append(run.instructions)
        return run.outputs
    finally:
        if target is None:
            del os.environ[TARGET]


def count_instructions(work: Callable[[], object]) -> int:
    """Returns how many instructions the kernels that `work` calls on the CPU have, by our
    simulator.

    Raises BackendRefusal where AWS's nki is installed, whose simulator counts nothing.
    """
    if RUNTIME != "simulator":
        raise BackendRefusal(
            "AWS's nki is installed here, and its simulator counts no instructions"
        )
    _counts.append([])
    try:
        work()
    finally:
        counts = _counts.pop()
    return sum(counts)


def require_within_rsqrt(name: str, value: float, least: float) -> None:
    """Raises BackendRefusal for an epsilon for which the kernels' rsqrt would fail an assertion."""
    if value < least:
        raise BackendRefusal(
            f"nki and nki-simulator need {name} >= {least:.3g}, where rsqrt becomes "
            f'exact; {name} is {value}: take a larger one, or backend="chunked"'
        )


def require_norms_within_rsqrt(tensors: Mapping[str, Tensor], eps: float) -> None:
    """Raises BackendRefusal for a row with a norm whose square, plus eps, the kernels' rsqrt does
    not take.

    It reads data: those of CPU tensors always, those of others in check mode, since they must be
    waited for.
    """
    most = plan.find_largest_norm(eps)
    for name, x in tensors.items():
        if not (x.device.type == "cpu" or is_checking()) or not x.numel():
            continue
        norm = x.float().norm(dim=-1).max().item()
        if norm > most:
            raise BackendRefusal(
                f"nki and nki-simulator need rows of {name} with norms up to {most:.2g}, which the "
                f"Scalar engine's rsqrt takes when squared; the largest here is {norm:.2g}: scale "
                f"{name} down, or "
                f'take backend="chunked"'
            )


def to_array(x: Tensor) -> np.ndarray:
    """Returns a tensor as a NumPy array; bfloat16 is ml_dtypes'."""
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def to_tensor(x: np.ndarray) -> Tensor:
    """Returns an array as a tensor."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


# What each kernel takes, by name: a name that stands under no type of SCALARS is a tensor.
SCALARS: dict[type, str] = {
    bool: "l2norm has_state has_dstate packed continued gated save",
    int: "every C lanes width K",
    float: "scale eps k_eps",
}
FORWARD = "q k v g beta initial_state scale l2norm has_state every C lanes width"
BACKWARD = (
    "q k v g beta do dstate initial_state states scale l2norm has_dstate has_state every C lanes "
    "width"
)
KERNELS = (
    (gated_delta_rule_fwd, FORWARD),
    (gated_delta_rule_bwd, BACKWARD),
    (gated_delta_rule_step, "q k v g beta state scale l2norm"),
    (kimi_delta_attention_fwd, FORWARD),
    (kimi_delta_attention_bwd, BACKWARD),
    (delta_residual_fwd, "x k v beta k_eps"),
    (delta_residual_bwd, "dout x k v beta k_eps"),
    (short_convolution_fwd, "x weight position packed prefix continued"),
    (short_convolution_bwd, "dy x weight position packed prefix continued"),
    (gated_rms_norm_fwd, "x z weight eps gated"),
    (gated_rms_norm_bwd, "dy x z weight eps gated"),
    (cross_entropy_fwd, "x_t w_t"),
    (cross_entropy_bwd, "x_t x w_t w goal"),
    (
        gated_delta_layer_fwd,
        "x weight g beta z gain position packed prefix continued initial_state has_state "
        "K scale eps save C lanes width",
    ),
    (
        gated_delta_layer_bwd,
        "dy x weight_t q k v o u g beta z gain position packed prefix continued dstate "
        "has_dstate initial_state has_state states scale eps C lanes width",
    ),
)


def make_launcher(kernel: Any, names: str) -> Callable[..., list[Tensor]]:
    """Makes a function that does nothing but call the kernel,
    and whose signature says the types.
    """
    types = {name: kind for kind, own in SCALARS.items() for name in own.split()}

    def launcher(*args: Any) -> list[Tensor]:
        return call(kernel, args)

    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        Parameter(name, kind, annotation=types.get(name, Tensor)) for name in names.split()
    ]
    launcher.__signature__ = Signature(parameters, return_annotation=list[Tensor])  # pyright: ignore
    launcher.__name__ = launcher.__qualname__ = kernel.__name__
    return launcher


def call(kernel: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Calls a kernel, and returns its outputs as a list: what an operator returns has one type."""
    outputs = kernel(*args)
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def missing() -> str | None:
    """Returns why kernels cannot run on "neuron" tensors here; None if they can."""
    try:
        package = import_module("torch_neuronx")
    except ModuleNotFoundError:
        return "needs torch_neuronx 2.14 and nki, from AWS Neuron's package index, on Trn2 or Trn3"
    if not hasattr(package, "nki_op"):
        return "needs torch_neuronx 2.14 (Neuron SDK 2.33): this one has no nki_op"
    return None


def launch(kernel: Any, args: tuple[Any, ...]) -> Any:
    """Returns the kernel's output, or its outputs, through its operator."""
    for (known, _), operator in zip(KERNELS, _operators(), strict=True):
        if known is kernel:
            outputs = operator(*args)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
    raise LookupError(f"kernel {kernel} has no launcher; add one to {__name__}.KERNELS")


@cache
def _operators() -> list[Callable[..., list[Tensor]]]:
    nki_op = import_module("torch_neuronx").nki_op
    launchers = [make_launcher(*entry) for entry in KERNELS]
    return [nki_op(f"delta_trn::nki_{f.__name__}", mutates_args={})(f) for f in launchers]
