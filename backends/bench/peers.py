"""Other people's implementations, for `backends.bench` to time beside ours. Imported only when
asked for.

hf      Hugging Face transformers' `torch_chunk_gated_delta_rule` (Qwen3-Next): PyTorch, what runs
        where no kernel is installed. Value heads share keys by repetition, as in its model; no
        packed sequences.
fla     flash-linear-attention's `chunk_gated_delta_rule`, CUDA only: Triton, or what its release
        0.6.0 hands the call to, FlashQLA or TileLang, where these are installed.
        FLA_DISABLE_BACKEND_DISPATCH=1 in the environment times its Triton alone.

Of Kimi Delta Attention hf has `chunk_kimi_delta_attention`, from release 5.23 on, and fla
`chunk_kda`.

For one token theirs are `torch_recurrent_gated_delta_rule` and `fused_recurrent_gated_delta_rule`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from delta_trn.backends.dispatch import BACKENDS, adapter
from delta_trn.backends.gated_delta_rule import contract
from delta_trn.backends.gated_delta_rule.checks import gate_arguments
from delta_trn.backends.gated_delta_rule.contract import make_gates
from delta_trn.backends.kimi_delta_attention import CHANNELS, SAFE
from delta_trn.backends.parity.rule_cases import Inputs

Run = Callable[[Inputs], Tensor]
# a peer's function under the names and in the order of `backends.gated_delta_rule`
Rule = Callable[..., tuple[Tensor, Tensor | None]]
# its arguments about gates
GATES = ("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


@dataclass(frozen=True)
class Peer:
    """Names a peer, where it comes from and what it takes; `load` and `load_step` return its
    functions.

    load_channels   the same of the operation with a decay per channel, which channels_module has
    """

    name: str
    distribution: str
    module: str
    channels_module: str
    devices: tuple[str, ...]
    packed: bool
    load: Callable[[], Rule]
    load_step: Callable[[], Rule]
    load_channels: Callable[[], Rule]

    def absent(self, device: str, channels: bool = False) -> str | None:
        """Returns why the peer cannot run on this machine's `device`; None if it can.

        channels    ask for the operation with a decay per channel
        """
        if find_spec(self.module) is None:
            return f"{self.distribution} is not installed: pip install {self.distribution}"
        if device not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device}"
        if channels and find_spec(self.channels_module) is None:
            return (
                f"{self.label()} has no {self.channels_module}: pip install --upgrade "
                f"{self.distribution}"
            )
        return None

    def run(self) -> Run:
        """Returns the function from a case's inputs to o."""

        @cache
        def form(channels: bool) -> Rule:
            return self.load_channels() if channels else self.load()

        return lambda x: form(x.case.has_channels)(x.q, x.k, x.v, x.g, x.beta, **x.arguments())[0]

    def step(self) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
        """Returns the function from a case's inputs, of one token, to o and the state."""
        rule = self.load_step()

        def run(x: Inputs) -> tuple[Tensor, Tensor]:
            o, state = rule(
                x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, output_final_state=True,
                use_qk_l2norm_in_kernel=x.case.normalized_inside,
            )  # fmt: skip
            assert state is not None
            return o[:, 0], state

        return run

    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {version(self.distribution)}"


def name_backends() -> str:
    """Returns which backends flash-linear-attention has chosen in this process, such as
    'flash_qla'.

    From release 0.6.0 on it notes every function that it handed to another backend than Triton.
    """
    found = sys.modules.get("fla.backends")
    registries = [
        *getattr(found, "_operation_registries", {}).values(),
        *getattr(found, "_function_registries", {}).values(),
    ]
    notes = {
        note for registry in registries for note in registry._logged if not note.endswith(":fail")
    }
    chosen = [f"{note.split(':')[1]} by {note.split(':')[2]}" for note in sorted(notes)]
    return ", ".join(chosen) or "Triton"


def computed_by(name: str, x: Inputs) -> str | None:
    """Returns which kernels computed a case, where a contender has several; None where it has not.

    name    of a peer, or of one of our backends, whose adapter says it by `name_kernels`
    """
    if name == "fla":
        return name_backends()
    describe = getattr(adapter(name, x.case.op), "name_kernels", None) if name in BACKENDS else None
    if describe is None:
        return None
    options = x.arguments()
    promised = SAFE if options.get("safe_gate") else None
    return describe(
        contract.Rule(
            x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, cu_seqlens=x.cu_seqlens,
            l2norm=x.case.normalized_inside, lower_bound=options.get("lower_bound", promised),
        )
    )  # fmt: skip


def _apply_gates(
    q: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes g and beta by PyTorch as `options` ask, and removes what they say about gates."""
    gates = {name: options.pop(name) for name in GATES if name in options}
    bound, bias, channels = options.pop("lower_bound", None), gates.get("dt_bias"), ""
    if g.dim() == q.dim():
        channels, gates["dt_bias"] = CHANNELS, None if bias is None else bias.view(v.shape[2], -1)
    beta_max = gate_arguments(q, v.shape[2], **gates, channels=channels)
    return make_gates(g, beta, gates.get("A_log"), gates.get("dt_bias"), beta_max, bound)


def _huggingface(name: str, model: str = "qwen3_next") -> Rule:
    # first of all, because `delta_trn` registers its models when this one is loaded
    import_module("transformers.models.auto.modeling_auto")
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    # unwrapped: transformers replaces the function by flash-linear-attention's where that is
    # installed
    form = inspect.unwrap(getattr(module, name))

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None,
        cu_seqlens: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if cu_seqlens is not None:
            raise ValueError("hf takes no packed sequences; leave cu_seqlens out")
        g, beta = _apply_gates(q, v, g, beta, options)
        group = v.shape[2] // q.shape[2]
        q, k = (y if group == 1 else y.repeat_interleave(group, dim=2) for y in (q, k))
        o, state = form(q, k, v, g, beta, **options)
        # its scale is K^-0.5 always, and o is linear in it
        return o if scale is None else o * (scale * q.shape[-1] ** 0.5), state

    return rule


def _flash_linear_attention(name: str, package: str = "gated_delta_rule") -> Rule:
    form = getattr(import_module(f"fla.ops.{package}"), name)
    # its later releases make both gates in kernels, A_log among **kwargs; for the others PyTorch
    # does
    makes_gates = "use_beta_sigmoid_in_kernel" in inspect.signature(form).parameters

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not makes_gates:
            g, beta = _apply_gates(q, v, g, beta, options)
        if options.get("lower_bound") is not None:  # as the models of Kimi Linear's family call it
            options["safe_gate"] = options["lower_bound"] >= SAFE
        # by name: in the recurrent form, gates of keys and of values stand between g and beta
        return form(q=q, k=k, v=v, g=g, beta=beta, **options)

    return rule


PEERS = {
    "hf": Peer(
        "hf",
        "transformers",
        "transformers",
        "transformers.models.kimi_linear",
        ("cpu", "cuda"),
        False,
        partial(_huggingface, "torch_chunk_gated_delta_rule"),
        partial(_huggingface, "torch_recurrent_gated_delta_rule"),
        partial(_huggingface, "chunk_kimi_delta_attention", "kimi_linear"),
    ),
    "fla": Peer(
        "fla",
        "flash-linear-attention",
        "fla",
        "fla.ops.kda",
        ("cuda",),
        True,
        partial(_flash_linear_attention, "chunk_gated_delta_rule"),
        partial(_flash_linear_attention, "fused_recurrent_gated_delta_rule"),
        partial(_flash_linear_attention, "chunk_kda", "kda"),
    ),
}
