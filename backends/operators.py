"""How an operation without a state reaches its backend: eagerly, under torch.compile, on lazy tensors.

An `Operator` is a pair of functions of an adapter's module, NAME_forward and NAME_backward, made differentiable:

    NAME_forward(*tensors, *options) -> an output, or outputs and then what backward wants back
    NAME_backward(*gradients of outputs, *tensors, *what was kept, *options) -> a gradient per differentiable tensor
    NAME_saved(*tensors, *options) -> [(shape, dtype)] of what is kept; a module without it keeps nothing

Under torch.compile it is the custom operators `delta_trn::NAME` and `delta_trn::NAME_backward`, with the
backend's name as an argument; otherwise a plain autograd.Function: a custom operator costs a layer 50 us a
call, and inside one lazy tensors are no longer functionalized (see `backends.lazy_autograd`). Adapters run
with autocast off: an operation computes in the dtype it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backends.registry import adapter

LIBRARY = "delta_trn"


class Operator:
    """NAME, its tensors ("gate?" may be None; "position*" has no gradient), its options with their schema types.

    fakes       (*tensors, *options) -> outputs of the right shapes and dtypes, nothing in them
    values      (*tensors, *options): raises ValueError for data that make no sense, where it may look
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: Sequence[str],
        options: Mapping[str, str],
        fakes: Callable[..., Sequence[Tensor]],
        outputs: int = 1,
        values: Callable[..., None] = lambda *given: None,
    ) -> None:
        self.name, self.fakes, self.outputs, self.values = name, fakes, outputs, values
        self.count = len(tensors)
        self.differentiable = [not word.endswith("*") for word in tensors]
        words = [(word.rstrip("?*"), "?" if "?" in word else "") for word in tensors]
        self.arguments = [word for word, _ in words] + list(options)
        given = ", ".join(
            [f"Tensor{mark} {word}" for word, mark in words]
            + [f"{kind} {word}" for word, kind in options.items()]
        )
        grads = ", ".join(["Tensor"] * sum(self.differentiable))
        douts = ", ".join(f"Tensor dout{i}" for i in range(outputs))
        self.forward = torch.library.custom_op(
            f"{LIBRARY}::{name}",
            self._forward,
            mutates_args=(),
            schema=f"({given}, str backend) -> ({', '.join(['Tensor'] * outputs)}, Tensor[])",
        )
        self.forward.register_fake(self._fake_forward)
        self.forward.register_autograd(self._differentiate, setup_context=self._keep)
        self.backward = torch.library.custom_op(
            f"{LIBRARY}::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({douts}, Tensor[] saved, {given}, str backend) -> ({grads})",
        )
        self.backward.register_fake(self._fake_backward)
        self.backward.register_autograd(self._refuse)

    def __call__(self, *given: Any, backend: str) -> tuple[Tensor, ...]:
        """The outputs; `given` are tensors, then options."""
        if torch.compiler.is_compiling():
            return self.forward(*given, backend)[: self.outputs]
        return _Eager.apply(self, backend, *given)  # type: ignore[return-value]

    def run(self, backend: str, given: Sequence[Any]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs and what is kept, by the adapter."""
        self.values(*given)
        with torch.autocast(given[0].device.type, enabled=False):
            found = getattr(adapter(backend, self.name), f"{self.name}_forward")(*given)
        found = (found,) if isinstance(found, Tensor) else tuple(found)
        return found[: self.outputs], list(found[self.outputs :])

    def gradients(
        self, backend: str, douts: Sequence[Tensor], saved: Sequence[Tensor], given: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        """One for each differentiable tensor, None for one that is absent."""
        tensors, options = given[: self.count], given[self.count :]
        with torch.autocast(douts[0].device.type, enabled=False):
            backward = getattr(adapter(backend, self.name), f"{self.name}_backward")
            return tuple(backward(*douts, *tensors, *saved, *options))

    def spread(self, grads: Sequence[Tensor | None], given: Sequence[Any]) -> list[Tensor | None]:
        """Gradients of all that was given: None where there is none."""
        rest = iter(grads)
        found = [next(rest) if differentiable else None for differentiable in self.differentiable]
        found = [grad if isinstance(x, Tensor) else None for grad, x in zip(found, given, strict=False)]
        return found + [None] * (len(given) - self.count)

    def _forward(self, *given: Any) -> tuple[Any, ...]:
        outputs, saved = self.run(given[-1], given[:-1])
        return *(y.contiguous() for y in outputs), [y.contiguous() for y in saved]

    def _fake_forward(self, *given: Any) -> tuple[Any, ...]:
        *given, backend = given
        shapes = getattr(adapter(backend, self.name), f"{self.name}_saved", None)
        kept = [] if shapes is None else shapes(*given)
        return *self.fakes(*given), [given[0].new_empty(shape, dtype=dtype) for shape, dtype in kept]

    def _backward(self, *given: Any) -> tuple[Tensor, ...]:
        douts, (saved, *rest, backend) = given[: self.outputs], given[self.outputs :]
        grads = self.gradients(backend, douts, saved, rest)
        return tuple(douts[0].new_empty(0) if grad is None else grad.contiguous() for grad in grads)

    def _fake_backward(self, *given: Any) -> tuple[Tensor, ...]:
        rest = given[self.outputs + 1 :]
        tensors = [x for x, wanted in zip(rest, self.differentiable, strict=False) if wanted]
        return tuple(given[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *given, ctx.backend = inputs
        ctx.options = given[self.count :]
        ctx.save_for_backward(*given[: self.count], *output[-1])
        ctx.mark_non_differentiable(*output[-1])

    def _differentiate(self, ctx: Any, *douts: Any) -> tuple[Tensor | None, ...]:
        tensors, saved = ctx.saved_tensors[: self.count], ctx.saved_tensors[self.count :]
        given = [*tensors, *ctx.options]
        grads = self.backward(*douts[: self.outputs], list(saved), *given, ctx.backend)
        return *self.spread(grads, given), None

    def _refuse(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"{self.name} has no second derivative; drop create_graph=True, or write it in PyTorch operations"
        )


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, backend: str, *given: Any) -> tuple[Tensor, ...]:
        outputs, saved = operator.run(backend, given)
        ctx.operator, ctx.backend, ctx.options = operator, backend, given[operator.count :]
        ctx.save_for_backward(*given[: operator.count], *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        n = ctx.operator.count
        given = [*ctx.saved_tensors[:n], *ctx.options]
        grads = _EagerBackward.apply(
            ctx.operator, ctx.backend, len(given), *given, *ctx.saved_tensors[n:], *douts
        )
        return None, None, *ctx.operator.spread(grads, given)  # type: ignore[arg-type]


class _EagerBackward(torch.autograd.Function):
    """A function of its own, so that a derivative of it can be refused by name."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, backend: str, count: int, *x: Any) -> tuple[Tensor | None, ...]:
        ctx.operator = operator
        end = len(x) - operator.outputs
        return operator.gradients(backend, x[end:], x[count:end], x[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        ctx.operator._refuse(ctx)
