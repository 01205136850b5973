"""The two numbers of each head, A_log and dt_bias: float32 in models of any precision, and under
FSDP.

    g = -exp(A_log) softplus(W_a x + dt_bias)           the logarithm of a head's decay

FSDP shards the parameters of a unit together, and refuses a unit of two precisions.
`separate_numbers` lets the numbers of a layer be a unit of their own. With this module imported,
FSDP's refusal says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = ("A_log", "dt_bias")
PLACE = "numbers"  # the attribute of a layer that has them once they are separate
ADVICE = (
    "A_log and dt_bias of Gated DeltaNet stay float32: call delta_trn.separate_numbers(model) "
    "before FSDP and make every HeadNumbers a unit of its own, or keep all weights in float32 and "
    "let mixed precision round them"
)


class Float32Numbers(nn.Module):
    """Keeps A_log and dt_bias in float32 where the module is cast.

    In bfloat16 one step is 0.4% of a value. Their updates are less, so they would not move.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Numbers:
        """Moves or casts the module, as `to`, `bfloat16` and `half` do."""
        return super()._apply(keep_numbers(self, fn), recurse)


def keep_numbers(layer: nn.Module, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns what moves or casts a tensor as fn does, but leaves A_log and dt_bias of a layer, or
    of a part of it, and their gradients, in float32.
    """
    found = (m._parameters.get(name) for m in layer.modules() for name in NUMBERS)
    kept = {id(x) for number in found if number is not None for x in (number, number.grad)}
    half = (torch.bfloat16, torch.float16)

    def cast(x: Tensor) -> Tensor:
        y = fn(x)
        narrow = id(x) in kept and y.dtype in half and x.dtype not in half
        return x.to(y.device) if narrow else y

    return cast


def is_in_memory(x: Tensor) -> bool:
    """Returns whether a parameter has its numbers here.

    It is False on the meta device, where accelerate leaves what it offloads, and for the tensors of
    no elements that DeepSpeed and FSDP leave of parameters whose parts other processes have.
    """
    return not x.is_meta and x.numel() > 0


class HeadNumbers(Float32Numbers):
    """Has the numbers of one layer, and lends them to it for each of its forward passes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name in NUMBERS:
            setattr(self, name, layer.get_parameter(name))
            delattr(layer, name)
        self.tags = getattr(layer, "tags", {})

    def forward(self) -> tuple[Tensor, ...]:
        """Returns copies: FSDP frees what it has gathered when this returns."""
        return tuple(getattr(self, name).clone() for name in NUMBERS)


def separate_numbers(model: nn.Module) -> list[HeadNumbers]:
    """Moves A_log and dt_bias of every layer into a module of its own, which FSDP can shard by
    itself.

    Returns these modules. Names in state dicts stay what they were, for
    torch.distributed.checkpoint, too. accelerate and Trainer find the modules by themselves. Call
    it after `patch_transformers` and before an optimizer is made. Raises ValueError for a model
    without a Gated DeltaNet layer.

        >>> from delta_trn import DeltaConfig, DeltaForCausalLM, separate_numbers
        >>> model = DeltaForCausalLM(DeltaConfig(vocab_size=50, hidden_size=32)).bfloat16()
        >>> {p.dtype for module in separate_numbers(model) for p in module.parameters()}
        {torch.float32}
    """
    found = [layer for _, layer in head_layers(model)]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer with A_log and dt_bias: nothing to separate"
        )
    for layer in [layer for layer in found if not isinstance(layer, HeadNumbers)]:
        layer.add_module(PLACE, HeadNumbers(layer))
        layer.register_forward_pre_hook(_lend)
        layer.register_forward_hook(_take_back, always_call=True)
        layer.register_state_dict_post_hook(_name_as_before)
        layer.register_load_state_dict_pre_hook(_name_by_place)
        layer._fqn_modifiers = _places  # type: ignore[assignment] - torch.distributed.checkpoint asks for it
    kept_whole: Any = getattr(model, "_no_split_modules", None) or ()
    model._no_split_modules = {*kept_whole, HeadNumbers.__name__}  # type: ignore[assignment]
    return [module for module in model.modules() if isinstance(module, HeadNumbers)]


def head_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of every layer that has A_log and dt_bias, or of its `HeadNumbers`."""
    for name, module in model.named_modules():
        if all(isinstance(getattr(module, number, None), nn.Parameter) for number in NUMBERS):
            yield name, module


def _lend(layer: nn.Module, arguments: Any) -> None:
    for name, number in zip(NUMBERS, getattr(layer, PLACE)(), strict=True):
        setattr(layer, name, number)


def _take_back(layer: nn.Module, arguments: Any, outputs: Any) -> None:
    for name in NUMBERS:
        vars(layer).pop(name, None)


def _name_as_before(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in NUMBERS:
        if (key := f"{prefix}{PLACE}.{name}") in state:
            state[f"{prefix}{name}"] = state.pop(key)


def _name_by_place(layer: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in NUMBERS:
        if (key := f"{prefix}{name}") in state:
            state[f"{prefix}{PLACE}.{name}"] = state.pop(key)


def _places() -> dict[str, str]:
    return dict.fromkeys(NUMBERS, PLACE)


def _explain(owner: type, check: str) -> None:
    """Adds what to do to the error by which FSDP refuses a unit of two precisions."""
    plain = getattr(owner, check)

    @functools.wraps(plain)
    def explained(*arguments: Any) -> Any:
        try:
            return plain(*arguments)
        except (AssertionError, ValueError) as error:
            if "uniform" not in str(error) or ADVICE in str(error):
                raise
            raise type(error)(f"{error}. {ADVICE}") from None

    setattr(owner, check, explained)


for _module, _owner, _check in (
    ("_fully_shard._fsdp_param_group", "FSDPParamGroup", "_init_mp_dtypes"),
    ("_flat_param", "FlatParamHandle", "_validate_tensors_to_flatten"),
):
    # in another torch its own words have to do
    with contextlib.suppress(ImportError, AttributeError):
        _explain(getattr(import_module(f"torch.distributed.fsdp.{_module}"), _owner), _check)
