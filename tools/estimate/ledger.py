"""Counts what PyTorch's operations move in a layer of Kimi Delta Attention, beside its kernels.

The mixer runs forward and backward on CPU tensors, with every Triton kernel left out, and each
operation that PyTorch itself would launch is noted with the bytes of its tensors, read and written.
Products of matrices are none of them: every implementation has the same. Bytes grow with the
tokens, but for those of weights, so that two lengths give those of any.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from delta_trn.backends import dispatch
from delta_trn.backends.dispatch import default_backend
from delta_trn.models.config import DeltaConfig
from delta_trn.models.kimi_delta_attention import KimiDeltaAttention
from delta_trn.models.sequence import Sequences

WIDTH, HEADS, SIZE = 2304, 32, 128  # of Kimi Linear 48B
DOCUMENT = 50  # tokens of each document, where rows are packed: their number changes no byte
KERNELS = "delta_trn.triton_kernels."
LENGTHS = (2048, 4096)
PRODUCTS = ("mm", "addmm")
MEMORY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")


@dataclass(frozen=True)
class Operation:
    """PyTorch operations of one name: how many, and what all of them move."""

    name: str
    backward: bool
    count: int
    per_token: float
    per_layer: float

    def bytes_of(self, tokens: int) -> float:
        return self.per_layer + self.per_token * tokens


def operations(*, packed: bool) -> list[Operation]:
    """Returns the operations of a layer in training, in bfloat16, with a bounded decay."""
    runs = [_run(tokens, packed) for tokens in LENGTHS]
    found = []
    for (name, backward), (count, size) in runs[0].items():
        slope = (runs[1][name, backward][1] - size) / (LENGTHS[1] - LENGTHS[0])
        found.append(Operation(name, backward, count, slope, size - slope * LENGTHS[0]))
    return found


def _run(tokens: int, packed: bool) -> dict[tuple[str, bool], tuple[int, int]]:
    """Returns name, backward -> operations of that name and their bytes, at so many tokens."""
    config = DeltaConfig(
        hidden_size=WIDTH, num_heads=HEADS, head_dim_k=SIZE, expand_v=1.0,
        mixer="kimi_delta_attention", decay_bound=-5.0,
    )  # fmt: skip
    mixer = KimiDeltaAttention(config).bfloat16()
    x = torch.zeros(1, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    places = torch.arange(tokens)[None] % DOCUMENT
    sequences = Sequences.rows(tokens, x.device)
    if packed:
        sequences = Sequences.documents(places, attention=False)
    dy, moved = torch.zeros_like(x), _Moved()
    with default_backend("triton"), _without_kernels():
        with moved:
            y = mixer(x, sequences)
        moved.backward = True
        with moved:
            y.backward(dy)
    return {key: (count, moved.bytes[key]) for key, count in moved.count.items()}


class _Moved(TorchDispatchMode):
    """Notes PyTorch's operations that move data, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.backward = False
        self.count: Counter[tuple[str, bool]] = Counter()
        self.bytes: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema = function._schema
        name = schema.name.removeprefix("aten::")
        if name in PRODUCTS:  # takes long, and its values do not matter
            return args[-2].new_empty(args[-2].shape[0], args[-1].shape[1])
        out = function(*args, **(kwargs or {}))
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if not (view or name in MEMORY):
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.count[name, self.backward] += 1
            self.bytes[name, self.backward] += sum(x.nbytes for x in tensors)
        return out


class _Absent:
    """Stands for a kernel that is launched and does nothing."""

    def __getitem__(self, grid: object) -> object:
        return lambda *arguments, **named: None


@contextmanager
def _without_kernels() -> Iterator[None]:
    """Leaves out every launch, and lets the backend take CPU tensors meanwhile."""
    for op in ("kimi_delta_attention", "short_convolution"):
        dispatch.adapter("triton", op)  # which imports its kernels' modules
    modules = [x for name, x in sys.modules.items() if name.startswith(KERNELS)]
    with patch.object(dispatch, "TRITON_DEVICES", dispatch.TRITON_DEVICES | {"cpu"}):
        patches = [
            patch.object(module, name, _Absent())
            for module in modules
            for name in vars(module)
            if name.endswith("_kernel")
        ]
        for x in patches:
            x.start()
        try:
            yield
        finally:
            for x in patches:
                x.stop()
