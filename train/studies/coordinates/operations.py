"""What a coordinate check reads besides modules' outputs: each matrix's own update, attention's
logits, and what bare parameters are used for.

A module's output changes by W dx + dW x. Where its input moves a lot, as behind an embedding that
learns fast, the first part is nearly all of it, and says nothing of W's rate. So every matrix has a
row of its own, (W - W_0) x_0 with the inputs of step 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from delta_trn.models.ecosystem.layouts import MATRIX, TABLE, TURNED, find_layout

OWN_UPDATE, MUON_UPDATE = "own update", "own update by Muon"
# Unrelated queries and keys have logits of 1/sqrt(head size) if these are divided by the head size,
# as they must be where heads grow. So logits are read times its root, where it is known.
ATTENTION, SOFTMAX_INPUT, USED = "attention logits times root of d", "softmax's input", "as used"
MASKED = -1e4  # what a mask adds to a logit is below this
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class OwnUpdates:
    """The matrices of a model before training, and what they read then."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, skipped: nn.Module | None
    ) -> None:
        orthogonal = {
            id(p)
            for group in optimizer.param_groups
            if group.get("use_muon", "heads" in group)
            for p in group["params"]
        }
        self.inputs: dict[str, Tensor] = {}
        self.matrices: dict[str, tuple[nn.Parameter, Tensor, bool]] = {}
        self.handles = []
        for prefix, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if module is skipped or isinstance(module, (nn.Embedding, _ConvNd)):
                continue
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            layout = find_layout(module, "weight", 2)
            if layout not in (MATRIX, TURNED):
                continue
            kind = MUON_UPDATE if id(weight) in orthogonal else OWN_UPDATE
            name = f"{prefix} ({kind})"
            self.matrices[name] = weight, weight.detach().clone(), layout == TURNED
            self.handles.append(module.register_forward_hook(self._keep(name)))

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, given: tuple[Any, ...], __: Any) -> None:
            if given and isinstance(given[0], Tensor) and name not in self.inputs:
                self.inputs[name] = given[0].detach()

        return keep

    def forget(self) -> None:
        """Keeps no more inputs: those of step 0 are there."""
        for handle in self.handles:
            handle.remove()

    def read(self) -> Iterator[tuple[str, float]]:
        """Yields (row, root mean square of what the matrix has learned of its first inputs)."""
        for name, (weight, before, turned) in self.matrices.items():
            x = self.inputs.get(name)
            moved = weight.detach() - before
            if x is not None and x.shape[-1] == moved.shape[0 if turned else 1]:
                y = x @ (moved if turned else moved.T)
                yield name, y.square().mean().sqrt().item()


class Operations(TorchFunctionMode):
    """Within `with`, keeps attention's logits, and the results of operations with bare
    parameters.
    """

    def __init__(self, model: nn.Module, outputs: dict[str, list[Tensor]]) -> None:
        super().__init__()
        self.outputs, self.attentions = outputs, 0
        self.bare = dict(bare_parameters(model))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._keep(ATTENTION, _logits(*args, **kwargs))
        elif func in SOFTMAX and args and args[0].dim() == 4:
            logits = args[0].detach()
            self._keep(SOFTMAX_INPUT, logits[logits > MASKED])
        for arg in (*args, *kwargs.values()):
            name = self.bare.get(id(arg))
            if name is not None and isinstance(result, Tensor) and result.is_floating_point():
                self.outputs[f"{name} ({USED})"].append(result.detach())
        return result

    def _keep(self, name: str, logits: Tensor) -> None:
        self.outputs[f"{name} {self.attentions}"] = [logits.detach()]
        self.attentions += 1


def bare_parameters(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yields (id, name) of matrices that are not the weight of a layer whose output is read."""
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding, _ConvNd)):
            continue
        for attribute, p in module.named_parameters(recurse=False):
            layout = find_layout(module, attribute, p.dim())
            if p.dim() > 1 and (layout is None or layout == TABLE):
                yield id(p), f"{prefix}.{attribute}".lstrip(".")


def _logits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns what scaled_dot_product_attention takes the softmax of, times the root of the head
    size; its masks are left out.
    """
    query, key = query.detach().float(), key.detach().float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    root = math.sqrt(query.shape[-1])
    return query @ key.mT * (1.0 if scale is None else scale * root)
