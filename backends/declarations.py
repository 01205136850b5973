"""What every backend declares, as one table: a row for each backend and operation.

The first automatic backend that covers a call is chosen, so the order matters: those with kernels come first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

from delta_trn.backends.registry import Backend, Capability, register

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
GPU_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
NEURON_FLOATS = frozenset({torch.float32, torch.bfloat16})

CUDA, CPU = frozenset({"cuda"}), frozenset({"cpu"})
NEURON = frozenset({"xla", "neuron"})

PSUM_BANK = "2 K or V float32 columns must fit one bank of 2 KiB of trn1's PSUM"
NORM_BANKS = "the sums of dweight fill the 8 banks of PSUM"
NEIGHBORS = "a diagonal and a mask per tap lie in SBUF"
ONE_CALL = "what a layer keeps on chip must fit SBUF, and its instructions one kernel call"
READOUT = "dweight of 256 words fills four banks of PSUM; a target is compared as a float32"
WHOLE_ROWS = "a program holds whole rows in registers, or spills"


def _rule(file: str) -> str:
    return f"delta_trn.backends.gated_delta_rule.{file}"


def _residual(file: str) -> str:
    return f"delta_trn.backends.delta_residual.{file}"


def _layer(file: str) -> str:
    return f"delta_trn.backends.gated_delta_layer.{file}"


def _layers(file: str) -> str:
    return f"delta_trn.backends.layers.{file}"


def _nki(devices: frozenset[str], automatic: frozenset[str]) -> dict[str, Capability]:
    """Returns the rows of the NKI kernels, which run on a device and in the simulator alike."""
    on = NEURON_FLOATS, devices, automatic
    heads = {"K": 256, "V": 512}
    layer = {
        "K bytes": 256, "V bytes": 512, "packed V bytes": 384, "packed K V bytes": 36864, "W": 4,
        "chunks": 64, "tokens of many heads": 1024,
    }  # fmt: skip
    return {
        "gated_delta_rule": Capability(_rule("nki_adapter"), *on, heads, PSUM_BANK),
        "gated_delta_rule_step": Capability(_rule("nki_adapter"), *on, heads, PSUM_BANK),
        # the keys of 128 tokens stay on chip whole
        "delta_residual": Capability(_residual("nki_adapter"), *on, {"D": 12288}),
        "short_convolution": Capability(
            _layers("nki_adapter"), *on, {"W": 32}, NEIGHBORS, forms=frozenset({"silu"})
        ),
        "gated_rms_norm": Capability(_layers("nki_adapter"), *on, {"N": 4096}, NORM_BANKS),
        "linear_cross_entropy": Capability(
            _layers("nki_adapter"), *on, {"d": 1024, "vocabulary": 2**24}, READOUT
        ),
        "gated_delta_layer": Capability(_layer("nki_adapter"), *on, layer, ONE_CALL),
    }


def _chunked_note() -> str:
    return import_module(_rule("chunked_kernel")).library().note


_TRITON = GPU_FLOATS, CUDA | CPU, CUDA
_LAYERS = Capability(_layers("pytorch"), FLOATS, automatic=None)  # PyTorch's form is every device's

TABLE: Mapping[str, Mapping[str, Capability]] = {
    "triton": {
        "gated_delta_rule": Capability(_rule("triton_adapter"), *_TRITON, {"K": 256}, gates=True),
        "gated_delta_rule_step": Capability(_rule("triton_adapter"), *_TRITON, {"K": 256}, gates=True),
        "delta_residual": Capability(_residual("triton_adapter"), *_TRITON),
        "short_convolution": Capability(_layers("triton_adapter"), *_TRITON, {"W": 8}),
        "gated_rms_norm": Capability(_layers("triton_adapter"), *_TRITON, {"N": 8192}, WHOLE_ROWS),
        "add_rms_norm": Capability(_layers("triton_adapter"), *_TRITON, {"N": 8192}, WHOLE_ROWS),
        "linear_cross_entropy": Capability(_layers("triton_adapter"), *_TRITON),
    },
    "nki": _nki(NEURON, automatic=NEURON),
    "chunked": {
        "gated_delta_rule": Capability(_rule("chunked"), FLOATS, automatic=CPU, note=_chunked_note),
        "gated_delta_rule_step": Capability(_rule("chunked"), FLOATS, automatic=CPU, note=_chunked_note),
        "delta_residual": Capability(_residual("chunked"), FLOATS, automatic=CPU),
        "short_convolution": _LAYERS,
        "gated_rms_norm": _LAYERS,
        "add_rms_norm": _LAYERS,
        "linear_cross_entropy": _LAYERS,
    },
    "nki-simulator": _nki(CPU, automatic=frozenset()),
    # T steps one after the other: exact, and slow on purpose, so only by name
    "recurrent": {
        "gated_delta_rule": Capability(_rule("recurrent"), FLOATS, gates=True),
        "gated_delta_rule_step": Capability(_rule("recurrent"), FLOATS, gates=True),
        "delta_residual": Capability(_residual("recurrent"), FLOATS),
    },
}


def triton_missing(device: str) -> str | None:
    """Returns why Triton's kernels cannot run on `device` here; None if they can."""
    if find_spec("triton") is None:
        return "needs the triton package: pip install triton"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on CPU tensors only in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
    return None


def nki_missing(device: str) -> str | None:
    """Returns why NKI's kernels cannot run on `device` here; None if they can."""
    if device == "neuron":
        return import_module("delta_trn.backends.nki_runtime_adapter").missing()
    absent = [name for name in ("torch_xla", "nki") if find_spec(name) is None]
    if absent:
        return f"needs {' and '.join(absent)}, from AWS Neuron's package index: docs/trainium.md says how"
    return _placeholder()


def simulator_missing(device: str) -> str | None:
    """Returns why the simulator cannot run here; None if it can.

    Where AWS's nki is installed, kernels are written in its language, and only its simulator runs them.
    """
    if find_spec("nki") is None:
        return None
    if placeholder := _placeholder():
        return placeholder
    version = metadata.version("nki")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (0, 3):
        return f"nki {version} has no simulator: install 0.3 or newer, or none, for the one that is included"
    return None


def _placeholder() -> str | None:
    """Returns what to do if the installed nki is the public index's of that name; None if it is AWS's.

    That package has no modules, and importing it raises. So its files are looked at, and it is not imported.
    """
    spec = find_spec("nki")
    if spec is None or PathFinder.find_spec("nki.isa", spec.submodule_search_locations) is not None:
        return None
    return (
        "the package nki that is installed is a placeholder from the public index, without nki.isa: "
        "pip uninstall nki, then install AWS's own from https://pip.repos.neuron.amazonaws.com"
    )


def declare() -> None:
    """Registers the backends of this tree."""
    missing = {"triton": triton_missing, "nki": nki_missing, "nki-simulator": simulator_missing}
    emulated = {"triton": CPU, "nki-simulator": CPU}
    for name, capabilities in TABLE.items():
        register(
            Backend(
                name,
                capabilities,
                missing.get(name, lambda device: None),
                emulated.get(name, frozenset()),
            )
        )


# here, and not in __init__.py, which `python -m backends` executes a second time
declare()
