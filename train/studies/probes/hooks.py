"""Hooks that show the tensors inside a model's token mixers, and change none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from delta_trn.backends import gated_delta_rule
from delta_trn.models.gated_deltanet import GatedDeltaNet

if TYPE_CHECKING:
    from delta_trn.models import DeltaForCausalLM

L2_EPSILON = 1e-6  # as in the operation's own normalization of q and k


@dataclass
class MixerView:
    """One Gated DeltaNet layer in one forward pass.

    x       [B, T, d]         input
    qkv     [B, T, channels]  after convolution and SiLU, before normalization
    o       [B, T, HV, V]     output of the delta rule, with its scale, before its norm
    y       [B, T, HV V]      input of the output projection: normalized and gated
    out     [B, T, d]         what the layer adds to the residual stream
    """

    mixer: GatedDeltaNet
    x: Tensor
    sequences: Any
    qkv: Tensor
    o: Tensor
    y: Tensor
    out: Tensor

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k [B, T, H, K] and v [B, T, HV, V], before normalization."""
        sizes = (self.mixer.K, self.mixer.K, self.mixer.V)
        parts = self.qkv.split(self.mixer.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        return q, k, v

    def gate_inputs(self) -> tuple[Tensor, Tensor]:
        """Returns W_a x + dt_bias and W_b x, [B, T, HV]: the inputs of softplus and of beta's sigmoid."""
        a, b = self.mixer.a_proj.weight, self.mixer.b_proj.weight
        x = self.x.to(a.dtype)
        return x @ a.T + self.mixer.dt_bias, x @ b.T

    def gates(self) -> tuple[Tensor, Tensor]:
        """Returns g = log(alpha) and beta, [B, T, HV]."""
        return self.mixer.gates(self.x, self.sequences)

    def state(self, tokens: int | None = None) -> Tensor:
        """Returns the state [B, HV, K, V] after the first `tokens`, or after all."""
        q, k, v = (x[:, :tokens] for x in self.split())
        g, beta = (x[:, :tokens] for x in self.gates())
        _, state = gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        assert state is not None
        return state


@dataclass
class ModelView:
    """One forward pass; `stream` is the residual stream before each block, and then after the last.

    mlps    [B, T, d] of each block, what its MLP computes
    """

    stream: list[Tensor]
    hidden: Tensor
    mixers: dict[int, MixerView]
    mlps: list[Tensor]


@contextlib.contextmanager
def observed(model: DeltaForCausalLM, *, gradients: bool = False) -> Iterator[list[ModelView]]:
    """Within `with`, every forward pass of the model adds a view to the list.

    With `gradients` the viewed tensors keep theirs: backward fills `.grad` of x, qkv, o, y, out and stream.
    """
    views: list[ModelView] = []
    parts: dict[str, Any] = {}

    def see(name: str, tensor: Any) -> None:
        if gradients and tensor.requires_grad:
            tensor.retain_grad()
        parts[name] = tensor

    handles = []
    block: Any
    for i, block in enumerate(model.model.blocks):
        handles.append(block.register_forward_pre_hook(lambda _, inputs, i=i: see(f"{i} stream", inputs[0])))
        handles.append(block.mlp.register_forward_hook(lambda _, inputs, out, i=i: see(f"{i} mlp", out)))
        mixer = block.mixer
        if not isinstance(mixer, GatedDeltaNet):
            continue

        def enter(_: Any, inputs: Any, i: int = i) -> None:
            see(f"{i} x", inputs[0])
            parts[f"{i} sequences"] = inputs[1]

        handles += [
            mixer.register_forward_pre_hook(enter),
            mixer.register_forward_hook(lambda _, inputs, out, i=i: see(f"{i} out", out)),
            mixer.conv.register_forward_hook(lambda _, inputs, out, i=i: see(f"{i} qkv", out)),
            mixer.o_norm.register_forward_pre_hook(lambda _, inputs, i=i: see(f"{i} o", inputs[0])),
            mixer.o_proj.register_forward_pre_hook(lambda _, inputs, i=i: see(f"{i} y", inputs[0])),
        ]

    def leave(_: Any, inputs: Any, out: Tensor) -> None:
        see("end", inputs[0])
        mixers = {
            i: MixerView(
                block.mixer, *(parts[f"{i} {name}"] for name in ("x", "sequences", "qkv", "o", "y", "out"))
            )
            for i, block in enumerate(model.model.blocks)
            if isinstance(block.mixer, GatedDeltaNet)
        }
        stream = [parts[f"{i} stream"] for i in range(len(model.model.blocks))]
        mlps = [parts[f"{i} mlp"] for i in range(len(model.model.blocks))]
        views.append(ModelView([*stream, parts["end"]], out, mixers, mlps))
        parts.clear()

    handles.append(model.model.norm.register_forward_hook(leave))
    try:
        yield views
    finally:
        for handle in handles:
            handle.remove()


def normalized(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6) over the last dimension, as the operation computes it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def rms(x: Tensor) -> float:
    """Returns sqrt(mean x^2), computed in float64."""
    return float(x.detach().double().square().mean().sqrt())
