"""How an operation without a state reaches its backend: eagerly, under torch.compile, on lazy tensors.

An `Operator` is a pair of functions of an adapter's module, made differentiable:

    NAME_forward(*tensors, *options) -> an output, or outputs and then what backward wants back
    NAME_backward(*gradients of outputs, *what it reads, *what was kept, *options) -> gradients
    NAME_saved(*tensors, *options) -> [(shape, dtype)] of what is kept; a module without it keeps nothing

Under torch.compile it is the custom operators `delta_trn::NAME` and `delta_trn::NAME_backward`, with the
backend's name as an argument; otherwise a plain autograd.Function: a custom operator costs a layer 50 us a
call, and inside one lazy tensors are no longer functionalized (see `backends.autograd`). Adapters run
with autocast off: an operation computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.registry import adapter

LIBRARY = "delta_trn"


class Operator:
    """NAME, its tensors, and its options with their types in a schema. A tensor named "gate?" may be None.

    outputs     their names
    fakes       (*tensors, *options) -> outputs of the right shapes and dtypes, with nothing in them
    reads       tensors and outputs that backward reads; None: all tensors
    gradients   for each gradient that backward returns, the tensors whose it is; None: each of `reads`
    backward_fakes      (*gradients of outputs, *reads, *kept, *options) -> gradients; None: like `reads`
    values      (*tensors, *options): raises ValueError for data that make no sense, where it may look
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: Sequence[str],
        options: Mapping[str, str],
        outputs: Sequence[str] = ("out",),
        fakes: Callable[..., Sequence[Tensor]],
        reads: Sequence[str] | None = None,
        gradients: Sequence[Sequence[str]] | None = None,
        backward_fakes: Callable[..., Sequence[Tensor]] | None = None,
        values: Callable[..., None] = lambda *given: None,
    ) -> None:
        self.name, self.outputs, self.fakes, self.values = name, tuple(outputs), fakes, values
        optional = {word.rstrip("?") for word in tensors if word.endswith("?")}
        self.tensors = [word.rstrip("?") for word in tensors]
        self.reads = self.tensors if reads is None else list(reads)
        self.gradients = [(word,) for word in self.reads] if gradients is None else gradients
        self.backward_fakes = self._like_reads if backward_fakes is None else backward_fakes

        def schema(words: Sequence[str]) -> list[str]:
            return [f"Tensor{'?' * (word in optional)} {word}" for word in words]

        constants = [f"{kind} {word}" for word, kind in options.items()]
        self.forward = torch.library.custom_op(
            f"{LIBRARY}::{name}",
            self._forward,
            mutates_args=(),
            schema=f"({', '.join([*schema(self.tensors), *constants, 'str backend'])}) -> "
            f"({', '.join(['Tensor'] * len(outputs))}, Tensor[])",
        )
        self.forward.register_fake(self._fake_forward)
        self.forward.register_autograd(self._differentiate, setup_context=self._keep)
        given = [f"Tensor d{word}" for word in outputs] + schema(self.reads)
        given += ["Tensor[] kept", *constants, "str backend"]
        self.backward = torch.library.custom_op(
            f"{LIBRARY}::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({', '.join(given)}) -> ({', '.join(['Tensor'] * len(self.gradients))})",
        )
        self.backward.register_fake(self._fake_backward)
        self.backward.register_autograd(self._refuse)

    def __call__(self, *given: Any, backend: str) -> tuple[Tensor, ...]:
        """The outputs; `given` are tensors, then options."""
        if torch.compiler.is_compiling():
            return self.forward(*given, backend)[:-1]
        return _Eager.apply(self, backend, *given)  # type: ignore[return-value]

    def run(self, backend: str, given: Sequence[Any]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs and what is kept, by the adapter."""
        self.values(*given)
        with torch.autocast(given[0].device.type, enabled=False):
            found = getattr(adapter(backend, self.name), f"{self.name}_forward")(*given)
        found = (found,) if isinstance(found, Tensor) else found
        n = len(self.outputs)
        return tuple(found[:n]), list(found[n:])

    def differentiate(self, backend: str, given: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Gradients, by the adapter; None for a tensor that is absent."""
        with torch.autocast(given[0].device.type, enabled=False):
            return tuple(getattr(adapter(backend, self.name), f"{self.name}_backward")(*given))

    def read(self, given: Sequence[Any], outputs: Sequence[Tensor]) -> list[Any]:
        """What backward reads."""
        known = dict(
            zip((*self.tensors, *self.outputs), (*given[: len(self.tensors)], *outputs), strict=True)
        )
        return [known[word] for word in self.reads]

    def spread(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A gradient, or None, for each tensor."""
        found = {word: grad for words, grad in zip(self.gradients, grads, strict=True) for word in words}
        return [found.get(word) for word in self.tensors]

    def _forward(self, *given: Any) -> tuple[Any, ...]:
        outputs, kept = self.run(given[-1], given[:-1])
        return *(y.contiguous() for y in outputs), [y.contiguous() for y in kept]

    def _fake_forward(self, *given: Any) -> tuple[Any, ...]:
        shapes = getattr(adapter(given[-1], self.name), f"{self.name}_saved", None)
        kept = [] if shapes is None else shapes(*given[:-1])
        return *self.fakes(*given[:-1]), [given[0].new_empty(shape, dtype=dtype) for shape, dtype in kept]

    def _backward(self, *given: Any) -> tuple[Tensor, ...]:
        n = len(self.outputs) + len(self.reads)
        grads = self.differentiate(given[-1], (*given[:n], *given[n], *given[n + 1 : -1]))
        return tuple(given[0].new_empty(0) if grad is None else grad.contiguous() for grad in grads)

    def _fake_backward(self, *given: Any) -> tuple[Tensor, ...]:
        n = len(self.outputs) + len(self.reads)
        return tuple(self.backward_fakes(*given[:n], *given[n], *given[n + 1 : -1]))

    def _like_reads(self, *given: Any) -> list[Tensor]:
        read = given[len(self.outputs) : len(self.outputs) + len(self.reads)]
        like = dict(zip(self.reads, read, strict=True))
        found = [like[words[0]] for words in self.gradients]
        return [given[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in found]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *given, ctx.backend = inputs
        *outputs, kept = output
        ctx.options = given[len(self.tensors) :]
        ctx.absent = [x is None for x in given[: len(self.tensors)]]
        ctx.save_for_backward(*self.read(given, outputs), *kept)
        ctx.mark_non_differentiable(*kept)

    def _differentiate(self, ctx: Any, *douts: Any) -> tuple[Tensor | None, ...]:
        read, kept = ctx.saved_tensors[: len(self.reads)], ctx.saved_tensors[len(self.reads) :]
        grads = self.backward(*douts[:-1], *read, list(kept), *ctx.options, ctx.backend)
        grads = [grads] if isinstance(grads, Tensor) else grads
        found = [None if absent else x for x, absent in zip(self.spread(grads), ctx.absent, strict=True)]
        return *found, *[None] * len(ctx.options), None

    def _refuse(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{self.name} has no second derivative; drop create_graph=True, or write it in PyTorch operations"
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, backend: str, *given: Any) -> tuple[Tensor, ...]:
        outputs, kept = operator.run(backend, given)
        ctx.operator, ctx.backend, ctx.options = operator, backend, given[len(operator.tensors) :]
        ctx.save_for_backward(*operator.read(given, outputs), *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        grads = _EagerBackward.apply(ctx.operator, ctx.backend, *douts, *ctx.saved_tensors, *ctx.options)
        return None, None, *ctx.operator.spread(grads), *[None] * len(ctx.options)  # type: ignore[arg-type]


class _EagerBackward(torch.autograd.Function):
    """A function of its own, so that a derivative of it can be refused by name."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, backend: str, *given: Any) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        return operator.differentiate(backend, given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        ctx.operator._refuse(ctx)
