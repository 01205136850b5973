"""Other people's implementations, for `backends.bench` to time beside ours. Imported only when asked for.

hf      Hugging Face transformers' `torch_chunk_gated_delta_rule` (Qwen3-Next): PyTorch, what runs where no
        kernel is installed. Value heads share keys by repetition, as in its model; no packed sequences.
fla     flash-linear-attention's `chunk_gated_delta_rule`: Triton, CUDA only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

from torch import Tensor

from backends.cases import Inputs

Run = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Peer:
    """Where a peer comes from and what it takes; `load` gives a function from inputs to o."""

    name: str
    distribution: str
    module: str
    devices: tuple[str, ...]
    packed: bool
    load: Callable[[], Run]

    def absent(self, device: str) -> str | None:
        """Why it cannot run on this machine's `device`, or None."""
        if find_spec(self.module) is None:
            return f"{self.distribution} is not installed: pip install {self.distribution}"
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}"
        return None

    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {version(self.distribution)}"


def _huggingface() -> Run:
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    # unwrapped: transformers replaces the function by flash-linear-attention's where that is installed
    form = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def run(x: Inputs) -> Tensor:
        group = x.case.value_heads // x.case.H
        q, k = (y if group == 1 else y.repeat_interleave(group, dim=2) for y in (x.q, x.k))
        g, beta = x.gates().applied(x.g, x.beta)
        return form(q, k, x.v, g, beta, use_qk_l2norm_in_kernel=x.case.normalized_inside)[0]

    return run


def _flash_linear_attention() -> Run:
    form = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    # its later releases make both gates in kernels, A_log among **kwargs; for the others PyTorch does
    makes_gates = "use_beta_sigmoid_in_kernel" in inspect.signature(form).parameters

    def run(x: Inputs) -> Tensor:
        told, g, beta = x.arguments(), x.g, x.beta
        if not makes_gates:
            told = {name: told[name] for name in ("use_qk_l2norm_in_kernel", "cu_seqlens")}
            g, beta = x.gates().applied(g, beta)
        return form(x.q, x.k, x.v, g, beta, **told)[0]

    return run


PEERS = {
    "hf": Peer("hf", "transformers", "transformers", ("cpu", "cuda"), False, _huggingface),
    "fla": Peer("fla", "flash-linear-attention", "fla", ("cuda",), True, _flash_linear_attention),
}
