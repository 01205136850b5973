"""What every backend declares. The first automatic one that covers a call is chosen: the order matters."""

import os
import re
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec

import torch

from delta_trn.backends.registry import LAYERS, OPERATIONS, Backend, Capability, register

EVERY_FLOAT = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def _triton_missing(device: str) -> str | None:
    if find_spec("triton") is None:
        return "needs the triton package: pip install triton"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on CPU tensors only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    return None


def _nki_missing(device: str) -> str | None:
    if device == "neuron":
        return import_module("delta_trn.backends.neuron_adapter").missing()
    absent = [name for name in ("torch_xla", "nki") if find_spec(name) is None]
    if absent:
        return f"needs {' and '.join(absent)}, from AWS Neuron's package index: pip install torch-neuronx nki"
    return None


def _simulator_missing(device: str) -> str | None:
    """Where AWS's nki is installed, kernels are made of its language and only its simulator runs them."""
    if find_spec("nki") is None:
        return None
    found = metadata.version("nki")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < (0, 3):
        return f"nki {found} has no simulator: install 0.3 or newer, or none, for the one that is included"
    return None


def declare() -> None:
    """Registers the backends of this tree."""
    triton = Capability(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        devices=frozenset({"cuda", "cpu"}),
        automatic=frozenset({"cuda"}),
        max_k=256,
    )
    rule = replace(triton, gates=True)
    row = replace(triton, max_k=8192, bound_by="a program holds whole rows in registers, or spills")
    register(
        Backend(
            name="triton",
            adapter="delta_trn.backends.gated_delta_rule.triton_adapter",
            capabilities={
                "gated_delta_rule": rule,
                "gated_delta_rule_step": rule,
                "delta_residual": replace(triton, max_k=None),
                "short_convolution": replace(triton, max_k=None, max_v=8),
                "gated_rms_norm": row,
                "add_rms_norm": row,
                "linear_cross_entropy": replace(triton, max_k=None),
            },
            elsewhere=dict.fromkeys(LAYERS, "delta_trn.backends.layers.triton_adapter"),
            unavailable=_triton_missing,
            emulated=frozenset({"cpu"}),
        )
    )
    kernels = Capability(
        dtypes=frozenset({torch.float32, torch.bfloat16}), devices=frozenset({"xla", "neuron"}),
        automatic=frozenset({"xla", "neuron"}), max_k=256, max_v=512,
        bound_by="2 K or V float32 columns must fit one bank of 2 KiB of trn1's PSUM",
    )  # fmt: skip
    # over depth K is D: 128 tokens' keys stay on chip whole
    over_depth = replace(kernels, max_k=12288, max_v=None, bound_by="")
    taps = replace(
        kernels, max_k=None, max_v=32, forms=frozenset({"silu"}),
        bound_by="2 W - 2 rows of a tile of 128 are its neighbors'",
    )  # fmt: skip
    norm = replace(kernels, max_k=4096, max_v=None, bound_by="the sums of dweight fill the 8 banks of PSUM")
    register(
        Backend(
            name="nki",
            adapter="delta_trn.backends.gated_delta_rule.nki_adapter",
            capabilities={
                "gated_delta_rule": kernels,
                "gated_delta_rule_step": kernels,
                "delta_residual": over_depth,
                "short_convolution": taps,
                "gated_rms_norm": norm,
            },
            unavailable=_nki_missing,
            elsewhere=dict.fromkeys(
                ("short_convolution", "gated_rms_norm"), "delta_trn.backends.layers.nki_adapter"
            ),
        )
    )
    chunked = Capability(dtypes=EVERY_FLOAT, automatic=frozenset({"cpu"}))
    register(
        Backend(
            name="chunked",
            adapter="delta_trn.backends.gated_delta_rule.chunked",
            # after the backends with kernels, since its layers are every device's
            capabilities=dict.fromkeys(OPERATIONS, chunked)
            | dict.fromkeys(LAYERS, replace(chunked, automatic=None)),
            elsewhere={"delta_residual": "delta_trn.backends.delta_residual.chunked"}
            | dict.fromkeys(LAYERS, "delta_trn.backends.layers.pytorch"),
        )
    )
    here = {"devices": frozenset({"cpu"}), "automatic": frozenset()}
    simulated = replace(kernels, **here)
    register(
        Backend(
            name="nki-simulator",
            adapter="delta_trn.backends.gated_delta_rule.nki_adapter",
            capabilities={
                "gated_delta_rule": simulated,
                "gated_delta_rule_step": simulated,
                "delta_residual": replace(over_depth, **here),
                "short_convolution": replace(taps, **here),
                "gated_rms_norm": replace(norm, **here),
            },
            unavailable=_simulator_missing,
            emulated=frozenset({"cpu"}),
            elsewhere=dict.fromkeys(
                ("short_convolution", "gated_rms_norm"), "delta_trn.backends.layers.nki_adapter"
            ),
        )
    )
    # T steps one after the other: right, and slow on purpose, so only by name
    recurrent = Capability(dtypes=EVERY_FLOAT)
    register(
        Backend(
            name="recurrent",
            adapter="delta_trn.backends.gated_delta_rule.recurrent",
            capabilities={op: recurrent for op in OPERATIONS if op not in LAYERS},
            elsewhere={"delta_residual": "delta_trn.backends.delta_residual.recurrent"},
        )
    )
