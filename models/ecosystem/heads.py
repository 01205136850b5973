"""The two numbers of each head of a Gated DeltaNet layer: kept in float32, and checked for dead
heads.

    g = -exp(A_log) softplus(W_a x + dt_bias)           the logarithm of a head's decay

In bfloat16 one step of A_log is 0.4% of its value, so most updates are lost. And A drawn from U(0,
16) in bfloat16 can be exactly 0, so that A_log = log A is -inf: such a head never forgets, its
gradient is 0, and training cannot revive it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from delta_trn.models.head_numbers import NUMBERS, head_layers, is_in_memory

_EFFECTS = {
    "0": (
        "decay 1: the head never forgets, and its gradient is 0, so that training cannot change it"
    ),
    "inf": "decay 0: the head remembers nothing, and its gradient is not finite",
    "nan": "the head computes NaN",
}


@dataclass(frozen=True)
class DeadHead:
    """One head whose rate exp(A_log), or time step softplus(dt_bias),
    is 0, infinite or NaN in float32.
    """

    name: str
    head: int
    value: float
    effect: str

    def __str__(self) -> str:
        return f"{self.name}[{self.head}] = {self.value}: {self.effect}"


@dataclass(frozen=True)
class WeightsReport:
    """Has what `check_weights` found; true if every head is alive."""

    heads: int
    dead: tuple[DeadHead, ...]

    def __bool__(self) -> bool:
        return not self.dead

    def __str__(self) -> str:
        lines = [f"{self.heads} heads, {len(self.dead)} dead numbers", *map(str, self.dead)]
        if self.dead:
            one = self.dead[0]
            # a decay rate of 1, a time step of 0.01
            alive = 0.0 if one.name.endswith("A_log") else -4.6
            lines.append(
                "load the weights again in float32; if the heads are dead in the file, too, start "
                f"them anew, as by model.get_parameter({one.name!r}).data[{one.head}] = {alive}"
            )
        return "\n".join(lines)


def check_weights(model: nn.Module) -> WeightsReport:
    """Finds dead heads: A_log or dt_bias at -inf, +inf or NaN, or so far out that float32 has no
    decay.

    It reads every module that has these two parameters: Gated DeltaNet layers of ours, of
    transformers and of flash-linear-attention. Raises ValueError for a model that has none.

        >>> from delta_trn import DeltaConfig, DeltaForCausalLM, check_weights
        >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1))
        >>> bool(check_weights(model))
        True
        >>> model.model.blocks[0].mixer.A_log.data[2] = -torch.inf
        >>> print(check_weights(model).dead[0].name, check_weights(model).dead[0].head)
        blocks.0.mixer.A_log 2
    """
    dead: list[DeadHead] = []
    heads = 0
    layers = list(head_layers(model))
    for prefix, layer in layers:
        for attribute in NUMBERS:
            if not is_in_memory(layer.get_parameter(attribute)):
                raise ValueError(
                    f"{prefix}.{attribute} is not in memory: it is offloaded, or its parts are in "
                    "other processes; check the weights where they are whole, and call "
                    "patch_transformers() before such a model is loaded"
                )
        heads += layer.get_parameter("A_log").numel()
        for attribute, positive in (("A_log", torch.exp), ("dt_bias", nn.functional.softplus)):
            parameter, name = layer.get_parameter(attribute), f"{prefix}.{attribute}".lstrip(".")
            values = parameter.detach().float().cpu().flatten()
            for head, number in enumerate(positive(values).tolist()):
                if effect := _EFFECTS.get(f"{number:g}"):
                    dead.append(DeadHead(name, head, values[head].item(), effect))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer with A_log and dt_bias, so there is nothing to "
            "check"
        )
    return WeightsReport(heads, tuple(dead))


def keep_float32(kind: type) -> Callable[[], None]:
    """Lets `from_pretrained` of a class keep the two numbers in float32;
    returns what takes that back.
    """
    name = "_keep_in_fp32_modules_strict"
    before = vars(kind).get(name)
    setattr(kind, name, sorted({*(getattr(kind, name, None) or ()), *NUMBERS}))
    return lambda: delattr(kind, name) if before is None else setattr(kind, name, before)


def widen(layer: nn.Module) -> list[str]:
    """Puts the two numbers of a layer into float32; returns one sentence for each that was not."""
    done = []
    for _, owner in head_layers(layer):
        for name in NUMBERS:
            parameter = owner.get_parameter(name)
            if parameter.dtype in (torch.bfloat16, torch.float16):
                done.append(
                    f"{name} is float32 now, it was {str(parameter.dtype).removeprefix('torch.')}"
                )
                parameter.data = parameter.data.float()
    return done
