"""Checks that operations share, and check mode: whether calls look at their data.

Shapes, dtypes and devices are checked in every call, before any work. Data is read in check mode
only, since on an accelerator a look at data waits for it. A message says what the value is, what
was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token

from torch import Tensor, dtype, finfo, float32, float64


class BackendRefusal(RuntimeError):
    """No backend, or not the one asked for, can run a call; the message names every reason."""


_CHECKING: ContextVar[bool] = ContextVar("checking", default=False)


class checking:
    """Turns check mode on for a block: every call inside looks at its data.

    A call then refuses NaN and infinity in any input but g = -infinity, g > 0, beta outside [0, 2],
    keys longer than 1 where the operation does not normalize them, and wrong cu_seqlens on any
    device. `checking(False)` changes nothing, so that a run's configuration can be passed in. Holds
    for the calling thread's context.

        >>> import torch
        >>> from delta_trn import checking, delta_residual
        >>> x, k = torch.ones(1, 2), torch.tensor([[1.0, 0.0]])
        >>> with checking():
        ...     delta_residual(x, k, torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([[3., 1.]])
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self.tokens.append(_CHECKING.set(is_checking() or self.enabled))

    def __exit__(self, *exception: object) -> None:
        _CHECKING.reset(self.tokens.pop())


def is_checking() -> bool:
    """Returns whether check mode is on."""
    return _CHECKING.get()


def require_tensors(tensors: Mapping[str, object]) -> None:
    """Raises TypeError for what is no tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")


def require_shapes(
    letters: Mapping[str, str], tensors: Mapping[str, object], known: Mapping[str, int] = {}
) -> dict[str, int]:
    """Returns the sizes of the dimensions, which `letters` name for each tensor.

    Raises TypeError for what is no tensor, and ValueError where a size is neither the one that is
    `known` nor that of an earlier tensor.
    """
    sizes, origin = dict(known), {}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor")
        words = letters[name].split()
        if x.dim() != len(words):
            expected = in_brackets(words)
            raise ValueError(f"{name} {shape_of(x)} has {x.dim()} dimensions, expected {expected}")
        for letter, size in zip(words, x.shape, strict=True):
            if letter not in sizes:
                sizes[letter], origin[letter] = size, (name, x)
            elif sizes[letter] != size:
                other, y = origin.get(letter, (None, x))
                where = "" if other is None else f" of {other} {shape_of(y)}"
                raise ValueError(
                    f"{name} {shape_of(x)} is {in_brackets(words)} with {letter}={size}, "
                    f"but {letter}{where} is {sizes[letter]}"
                )
    return sizes


def require_one_device(x: Tensor, of: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError for tensors on another device than x, which is called `of`."""
    for name, y in tensors.items():
        if y is not None and y.device != x.device:
            raise ValueError(
                f"{name} is on {y.device}, {of} is on {x.device}; move all tensors to one device"
            )


def require_dtypes(
    x: Tensor, of: str, same: Mapping[str, Tensor], gates: Mapping[str, Tensor]
) -> None:
    """Raises TypeError unless `same` have the floating dtype of x,
    and `gates` that dtype or float32.
    """
    if not x.is_floating_point():
        raise TypeError(f"{of} is {x.dtype}; pass floating point tensors")
    for name, y in same.items():
        if y.dtype != x.dtype:
            raise TypeError(
                f"{name} is {y.dtype}, {of} is {x.dtype}; cast {of}, k and v to one dtype"
            )
    for name, y in gates.items():
        if y.dtype != x.dtype and (y.dtype != float32 or x.dtype == float64):
            wanted = dtype_name(x.dtype)
            wanted = wanted if x.dtype in (float32, float64) else f"float32 or {wanted}"
            raise TypeError(
                f"{name} is {y.dtype} beside {x.dtype} {of}; it must be {wanted}: cast it"
            )


def require_finite(tensors: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError, in check mode, for NaN and infinity."""
    if not is_checking():
        return
    for name, x in tensors.items():
        if x is not None:
            refuse_where(~x.isfinite(), name, x, "is not finite; look for where it was made")


def require_strengths(beta: Tensor, remedy: str) -> None:
    """Raises ValueError for a write strength outside [0, 2]."""
    refuse_where((beta < 0) | (beta > 2), "beta", beta, f"is outside [0, 2]; pass {remedy}")


def require_short_keys(k: Tensor, remedy: str) -> None:
    """Raises ValueError for keys longer than 1."""
    norm = k.double().norm(dim=-1) if k.dtype == float64 else k.float().norm(dim=-1)
    # rounding every element of a unit vector to k's dtype moves its norm by at most eps / 2
    refuse_where(
        norm > 1 + finfo(k.dtype).eps,
        "the norm of k",
        norm,
        "is above 1, so that 1 - beta |k|^2 may leave [-1, 1] and the state grow without bound; "
        f"normalize k, or pass {remedy}",
    )


def refuse_where(bad: Tensor, name: str, x: Tensor, complaint: str) -> None:
    """Raises ValueError with the place and the value of the first bad element, if there is one."""
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name} at {where} is {x[where].item():.6g}, which {complaint}")


def shape_of(x: Tensor) -> str:
    """Returns the sizes of x in brackets."""
    return in_brackets(x.shape)


def in_brackets(sizes: Sequence[object]) -> str:
    """Returns sizes or their names as text, such as [2, 3, 4]."""
    return f"[{', '.join(map(str, sizes))}]"


def dtype_name(dtype: dtype) -> str:
    """Returns a dtype's name without its module: bfloat16."""
    return str(dtype).removeprefix("torch.")
