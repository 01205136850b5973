"""Takes a call of a public function to its backend: eagerly, under torch.compile, on lazy tensors.

An `Operator` makes two functions of a backend's adapter differentiable. Its call is a frozen
dataclass: first the tensors, then the options.

    forward(call, *, save) -> (*outputs, saved)         saved: a list of tensors, empty unless
                                                        `save`
    backward(*douts, call, saved) -> gradients          douts: the gradients of the outputs
    saved_shapes(call) -> [(shape, dtype)]              of `saved` where FIXED_SHAPES is set;
                                                        without the function nothing is saved

Eagerly an operator is a plain autograd.Function. Under torch.compile it is the custom operators
`delta_trn::NAME` and `delta_trn::NAME_backward`, with the backend's name as an argument; the
dataclass gives their schemas. Eager calls avoid the custom operators for two reasons. Around an
adapter that does nothing, a call took 290 us forward and 530 us with backward as a custom operator,
and 85 us and 210 us as a function (one core, medians of 1000). And inside a custom operator lazy
tensors are no longer functionalized (torch 2.9): a write into a view does not reach its base, and
the chunked adapter returned zeros.

The custom operators also run calls under torch.jit.trace, make_fx and FakeTensorMode, give meta
tensors their shapes, and take tensors whose numbers others hold; `stand_ins` finds them. A call
whose first tensor has no elements reaches no backend.

Adapters run with autocast off, since an operation computes in the dtype of its inputs, with exact
products unless the operation `rounds`, and with the tensors' CUDA device as the current one, on
which Triton launches.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import fields
from operator import attrgetter, index
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends import machine, stand_ins
from delta_trn.backends.checks import BackendRefusal, shape_of
from delta_trn.backends.dispatch import OPERATIONS, adapter, choose_name, is_offered, selection

# "delta_trn", or another name for each copy of this file that an exported model brings along
LIBRARY = re.sub(r"\W", "_", __name__.removesuffix(".backends.operator"), flags=re.ASCII)
SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "float | None": "float?",
    "bool": "bool", "int": "int", "str": "str",
}  # fmt: skip
# whether a custom operator runs: what is saved then has the shapes that `saved_shapes` said before
FIXED_SHAPES: ContextVar[bool] = ContextVar("fixed_shapes", default=False)


def gradients_wanted(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records a call of these tensors."""
    if _is_tracing():
        # torch.jit.trace looks twice, once under no_grad; its graph may be differentiated later
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _is_tracing() -> bool:
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


class Operator:
    """Runs one operation on any backend; `call` is the dataclass of its tensors and options.

    fakes       call -> tensors like the outputs, with nothing in them
    outputs     their names; one such as "final_state?" may be None
    prefix      of the adapter's functions, where one module holds several operations
    reads       the tensors and outputs that backward reads; None: all tensors. Other tensors are
                None in backward's call; outputs come first in its `saved`
    gradients   for each gradient that backward returns, the names of the tensors that it belongs
                to; None: one for each tensor; empty: the operation has no backward, and its adapter
                function, named by `forward`, neither takes `save` nor returns `saved`
    gradient_fakes      (call, saved) -> tensors like the gradients; None: like their tensors
    values      call -> None; raises ValueError for impossible data, in check mode
    empty       call -> the outputs of a call whose first tensor has no elements; None: zeros
    rounds      whether `machine.set_products` applies; the products of other operations stay exact
    writes      names a tensor that the adapter writes into; the custom operator then ends in an
                underscore
    """

    def __init__(
        self,
        name: str,
        call: type,
        *,
        fakes: Callable[[Any], Sequence[Tensor | None]],
        outputs: Sequence[str] = ("out",),
        prefix: str = "",
        forward: str = "forward",
        reads: Sequence[str] | None = None,
        gradients: Sequence[Sequence[str]] | None = None,
        gradient_fakes: Callable[[Any, list[Tensor]], Sequence[Tensor]] | None = None,
        values: Callable[[Any], None] = lambda call: None,
        empty: Callable[[Any], Sequence[Tensor | None]] | None = None,
        rounds: bool = False,
        writes: str = "",
    ) -> None:
        self.name, self.call, self.fakes, self.values, self.prefix = (
            name,
            call,
            fakes,
            values,
            prefix,
        )
        self.empty = self._zeros if empty is None else empty
        self.writes = writes
        self.products = contextlib.nullcontext if rounds else machine.exact_products
        self.forward_name = prefix + forward
        types = {field.name: SCHEMA_TYPES[str(field.type)] for field in fields(call)}
        self.tensors = [word for word, type_ in types.items() if type_.startswith("Tensor")]
        self.words, self.flat = tuple(types), attrgetter(*types)
        self.first: Callable[[Any], Tensor] = attrgetter(self.tensors[0])
        self.outputs = [word.rstrip("?") for word in outputs]
        self.complete = not any(word.endswith("?") for word in outputs)
        self.reads = set(self.tensors if reads is None else reads)
        self.reads_tensors = reads is None
        self.gradients = [(word,) for word in self.tensors] if gradients is None else gradients
        places = {word: i for i, words in enumerate(self.gradients) for word in words}
        self.places = [places.get(word) for word in self.tensors]
        self.gradient_fakes = self._like_tensors if gradient_fakes is None else gradient_fakes
        self._define(types)
        if name not in OPERATIONS:
            OPERATIONS.append(name)

    def choose(
        self,
        tensors: Sequence[Tensor | None],
        sizes: Mapping[str, int],
        backend: str | None,
        *options: str,
        required: bool = True,
    ) -> tuple[Any, bool]:
        """Returns the name of the backend for a call, and whether the call's gradients are wanted.

        Device and dtype are those of the first tensor. Meta tensors have the backend that CPU
        tensors have. Unless one is `required`, the name is None where no backend runs the call, or
        only one that is allowed to. Raises TypeError inside torch.func's transforms and for tensors
        with tangents, and BackendRefusal for DTensors.
        """
        eager = not torch.compiler.is_compiling()
        if eager and torch._C._are_functorch_transforms_active():
            raise TypeError(
                f"{self.name} was called inside torch.vmap or another transform of torch.func, "
                "which do not know its kernels; make the mapped dimension part of the batch, and "
                "use torch.autograd for gradients"
            )
        if eager and stand_ins.has_tangents(tensors):
            raise TypeError(
                f"{self.name} was called with a tensor of forward-mode differentiation, and its "
                "kernels compute no tangents; take gradients in reverse mode, by "
                'torch.autograd.grad, or by jacobian with strategy="reverse-mode"'
            )
        x, default = tensors[0], selection()
        assert x is not None
        device = "cpu" if x.is_meta else x.device.type
        if not required and not is_offered(self.name, device, backend, default.name):
            return None, False
        # index(): sizes are constants of a compiled graph, even of one with dynamic shapes
        constants = tuple([(name, index(size)) for name, size in sizes.items()])
        wanted = gradients_wanted(*tensors)
        name = choose_name(
            self.name, device, x.device.index, x.dtype, constants, options, wanted, backend,
            default.name, default.allow, required,
        )  # fmt: skip
        if eager and name is not None and not stand_ins.PLAIN.issuperset(map(type, tensors)):
            self._refuse_divided(tensors, name)
        return name, wanted

    def __call__(self, call: Any, *, save: bool, backend: str) -> tuple[Any, ...]:
        """Returns the outputs, tensors or None as `outputs` says; differentiable where `save`."""
        x = getattr(call, self.tensors[0])
        if x.numel() == 0:
            return self._without_elements(call)
        if torch.compiler.is_compiling() or x.is_meta:
            return self._dispatch(call, save, backend)
        flat = self.flat(call)
        tensors = flat[: len(self.tensors)]
        if not self._is_eager(tensors, backend):
            return self._stand_in(call, tensors, save, backend)
        if save:
            return _Eager.apply(self, backend, *flat)  # type: ignore[return-value]
        return self.compute(call, save, backend)[0]

    def _is_eager(self, tensors: Sequence[Tensor | None], backend: str) -> bool:
        """Returns whether the adapter computes with these tensors now,
        and nobody records what is called.
        """
        if stand_ins.is_recorded():
            return False
        if stand_ins.is_plain(tensors):
            return True
        return stand_ins.find_wrapper(tensors) is not None and self._takes_subclasses(backend)

    def _takes_subclasses(self, backend: str) -> bool:
        return self.name in getattr(adapter(backend, self.name), "TAKES_SUBCLASSES", ())

    def _dispatch(self, call: Any, save: bool, backend: str) -> tuple[Any, ...]:
        """Returns the outputs of the custom operator."""
        outputs = self.forward(*[getattr(call, word) for word in self.words], save, backend)
        return outputs[:-1] if self.gradients else outputs

    def _stand_in(
        self, call: Any, tensors: Sequence[Tensor | None], save: bool, backend: str
    ) -> tuple[Any, ...]:
        """Returns the outputs of tensors that stand for others, or of a call that is recorded."""
        wrapper = stand_ins.find_wrapper(tensors)
        if wrapper is None:
            return self._dispatch(call, save, backend)
        self._refuse_divided(tensors, backend)
        try:
            return self._dispatch(call, save, backend)
        except (NotImplementedError, TypeError) as failure:
            raise BackendRefusal(
                f"{self.name} on the backend {backend} reads plain tensors, and was given a "
                f"{type(wrapper).__name__} {shape_of(wrapper)}, whose class does not say what to "
                f"do with {LIBRARY}::{self.name}; pass the plain tensors that it holds"
            ) from failure

    def _refuse_divided(self, tensors: Sequence[Tensor | None], backend: str) -> None:
        """Raises BackendRefusal for a DTensor that an adapter's kernels would look
        for in memory.
        """
        divided = next((x for x in tensors if x is not None and stand_ins.is_divided(x)), None)
        if divided is not None and not self._takes_subclasses(backend):
            raise BackendRefusal(
                f"{self.name} on the backend {backend} reads plain tensors, and was given a "
                f"DTensor {shape_of(divided)}, which is divided over processes; pass x.to_local() "
                "of each of its tensors, divided by rows or by heads, and make "
                "DTensor.from_local(...) of what it returns"
            )

    def _without_elements(self, call: Any) -> tuple[Tensor | None, ...]:
        """Returns the outputs of a call without elements;
        the gradients of its tensors are zeros.
        """
        tensors = [getattr(call, word) for word in self.tensors]
        if stand_ins.may_read(tensors[0]):
            self.values(call)
        zero = tensors[0].new_zeros(())
        for x in tensors:
            if x is not None and x.is_floating_point():
                zero = zero + x[:0].sum()
        return tuple(None if y is None else y + zero.to(y.dtype) for y in self.empty(call))

    def _zeros(self, call: Any) -> list[Tensor | None]:
        return [None if y is None else torch.zeros_like(y) for y in self.fakes(call)]

    def compute(
        self, call: Any, save: bool, backend: str
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
        """Returns the outputs and what the adapter saves for backward."""
        self.values(call)  # in check mode
        function = getattr(adapter(backend, self.name), self.forward_name)
        with self.settings(self.first(call)):
            if not self.gradients:
                return function(call), []
            *outputs, saved = function(call, save=save)
        return tuple(outputs), saved

    def settings(self, x: Tensor) -> contextlib.AbstractContextManager[object]:
        """Sets what adapters expect: no autocast, the CUDA device of x, exact products."""
        context = torch.autocast(x.device.type, enabled=False)
        if x.device.type == "xla":  # whose host pays for each, and which has no other products
            return context
        stack = contextlib.ExitStack()
        for entered in (context, self.products()):
            stack.enter_context(entered)
        if x.is_cuda:
            stack.enter_context(torch.cuda.device_of(x))
        return stack

    def differentiate(
        self, douts: Sequence[Tensor | None], call: Any, saved: list[Tensor], backend: str
    ) -> tuple[Tensor | None, ...]:
        """Returns the adapter's gradients; None for those of tensors that are absent."""
        if douts[0] is None:
            first = self.fakes(call)[0]
            assert first is not None
            douts = [first.zero_(), *douts[1:]]
        function = getattr(adapter(backend, self.name), f"{self.prefix}backward")
        assert douts[0] is not None
        with self.settings(douts[0]):
            return tuple(function(*douts, call, saved))

    def list_kept(
        self, flat: Sequence[Any], outputs: Sequence[Tensor | None], saved: list[Tensor]
    ) -> list[Tensor | None]:
        """Returns what autograd keeps: the tensors of backward's call, then its `saved`."""
        tensors = flat[: len(self.tensors)]
        if self.reads_tensors:
            return [*tensors, *saved]
        read = [y for word, y in zip(self.outputs, outputs, strict=True) if word in self.reads]
        kept = [
            x if word in self.reads else None for word, x in zip(self.tensors, tensors, strict=True)
        ]
        return [*kept, *read, *saved]

    def spread(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns a gradient, or None, for each tensor of a call."""
        return [None if i is None else gradients[i] for i in self.places]

    def refuse_second_derivative(self, *arguments: Any) -> None:
        """Raises RuntimeError, since backward has no backward of its own."""
        raise RuntimeError(
            f"{self.name} has no second derivative; drop create_graph=True, or write it in PyTorch "
            "operations"
        )

    def _refuse_batched(self, douts: Sequence[Tensor | None]) -> None:
        """Raises TypeError for gradients that each stand for many."""
        if not torch.compiler.is_compiling() and stand_ins.is_batched(douts):
            raise TypeError(
                f"gradients of {self.name} were asked for many at a time, which its kernels do "
                "not compute; leave out is_grads_batched=True of torch.autograd.grad, "
                "vectorize=True of jacobian and hessian, and torch.vmap around them, and ask for "
                "one after the other"
            )

    def _define(self, types: Mapping[str, str]) -> None:
        """Defines the custom operators."""
        marks = {self.writes: "Tensor(a!)"}
        inputs = [f"{marks.get(word, type_)} {word}" for word, type_ in types.items()]
        returns = ["Tensor"] * len(self.outputs) + ["Tensor[]"] * bool(self.gradients)
        self.forward = torch.library.custom_op(
            f"{LIBRARY}::{self.name}{'_' * bool(self.writes)}",
            self._forward,
            mutates_args=[self.writes] if self.writes else (),
            schema=f"({', '.join([*inputs, 'bool save, str backend'])}) -> ({', '.join(returns)})",
        )
        self.forward.register_fake(self._fake_forward)
        if not self.gradients:
            return
        self.forward.register_autograd(self._differentiate, setup_context=self._keep)
        arguments = [f"Tensor? d{word}" for word in self.outputs]
        arguments += [f"Tensor? {word}" for word in self.tensors]
        arguments += [
            f"{type_} {word}" for word, type_ in types.items() if word not in self.tensors
        ]
        self.backward = torch.library.custom_op(
            f"{LIBRARY}::{self.name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"({', '.join([*arguments, 'Tensor[] saved', 'str backend'])}) -> "
            f"({', '.join(['Tensor'] * len(self.gradients))})",
        )
        self.backward.register_fake(self._fake_backward)
        self.backward.register_autograd(self.refuse_second_derivative)

    def _forward(self, *arguments: Any) -> tuple[Any, ...]:
        *flat, save, backend = arguments
        token = FIXED_SHAPES.set(True)
        try:
            outputs, saved = self.compute(self.call(*flat), save, backend)
        finally:
            FIXED_SHAPES.reset(token)
        dense = tuple(_present(y, flat[0]) for y in outputs)
        return (*dense, [y.contiguous() for y in saved]) if self.gradients else dense

    def _fake_forward(self, *arguments: Any) -> tuple[Any, ...]:
        *flat, save, backend = arguments
        call = self.call(*flat)
        outputs = tuple(_present(y, flat[0]) for y in self.fakes(call))
        if not self.gradients:
            return outputs
        shapes = (
            getattr(adapter(backend, self.name), f"{self.prefix}saved_shapes", None)
            if save
            else None
        )
        saved = [] if shapes is None else shapes(call)
        return *outputs, [flat[0].new_empty(shape, dtype=dtype) for shape, dtype in saved]

    def _backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        douts, call, saved, backend = self._parts(arguments)
        absent = next(x for x in douts if x is not None)
        with _autograd_again():
            gradients = self.differentiate(douts, call, saved, backend)
        return tuple(_present(x, absent) for x in gradients)

    def _fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        douts, call, saved, _ = self._parts(arguments)
        absent = next(x for x in douts if x is not None)
        return tuple(_present(x, absent) for x in self.gradient_fakes(call, saved))

    def _parts(
        self, arguments: Sequence[Any]
    ) -> tuple[Sequence[Tensor | None], Any, list[Tensor], str]:
        """Returns douts, call, saved and backend."""
        *rest, saved, backend = arguments
        n = len(self.outputs)
        return rest[:n], self.call(*rest[n:]), saved, backend

    def _like_tensors(self, call: Any, saved: list[Tensor]) -> list[Tensor | None]:
        tensors = [getattr(call, words[0]) for words in self.gradients]
        return [None if x is None else x.new_empty(x.shape) for x in tensors]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *flat, ctx.saves, ctx.backend = inputs
        *outputs, saved = output
        ctx.options = flat[len(self.tensors) :]
        ctx.absent = [x is None for x in flat[: len(self.tensors)]]
        ctx.missing = [y.shape == (0,) for y in outputs]
        ctx.save_for_backward(*self.list_kept(flat, outputs, saved))
        ctx.set_materialize_grads(self.complete)
        ctx.mark_non_differentiable(*saved)

    def _differentiate(self, ctx: Any, *douts: Any) -> tuple[Tensor | None, ...]:
        if not ctx.saves:
            raise RuntimeError(
                f"{self.name} was called with save=False and is now asked for gradients; "
                f"call backends.{self.name}, which saves whenever an input requires grad"
            )
        douts = tuple(
            None if missing else dy for dy, missing in zip(douts[:-1], ctx.missing, strict=True)
        )
        self._refuse_batched(douts)
        gradients = self._dispatch_backward(douts, ctx.saved_tensors, ctx.options, ctx.backend)
        present = [
            None if gone else x for x, gone in zip(self.spread(gradients), ctx.absent, strict=True)
        ]
        return *present, *[None] * (len(ctx.options) + 2)

    def _dispatch_backward(
        self,
        douts: Sequence[Tensor | None],
        kept: Sequence[Tensor],
        options: Sequence[Any],
        backend: str,
    ) -> Sequence[Tensor | None]:
        """Returns the gradients by the custom operator; `kept` is what `list_kept` returned."""
        n = len(self.tensors)
        gradients = self.backward(*douts, *kept[:n], *options, list(kept[n:]), backend)
        return [gradients] if isinstance(gradients, Tensor) else gradients


def _autograd_again() -> contextlib.AbstractContextManager[None]:
    """Lets an adapter's backward use autograd,
    which dispatch leaves out inside a custom operator.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        "AutogradFunctionality",
        "AutogradOther",
        "AutogradNestedTensor",
        "ADInplaceOrView",
    ):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    """Returns what a custom operator may return: a dense tensor, an empty one in place of None."""
    return like.new_empty(0) if x is None else x.contiguous()


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operator: Operator, backend: str, *flat: Any
    ) -> tuple[Tensor | None, ...]:
        outputs, saved = operator.compute(operator.call(*flat), True, backend)
        ctx.operator, ctx.backend, ctx.options = operator, backend, flat[len(operator.tensors) :]
        # autograd may run backward in a thread of its own, where no context variable is set
        ctx.context = copy_context()
        ctx.save_for_backward(*operator.list_kept(flat, outputs, saved))
        ctx.set_materialize_grads(operator.complete)
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> Any:  # type: ignore[override]
        operator: Operator = ctx.operator
        if torch.is_grad_enabled():
            operator.refuse_second_derivative()
        operator._refuse_batched(douts)
        kept = ctx.saved_tensors  # read once: under checkpointing the first look recomputes them
        n = len(operator.tensors)
        if operator._is_eager(douts, ctx.backend):
            call = operator.call(*kept[:n], *ctx.options)
            gradients = ctx.context.run(
                operator.differentiate, douts, call, list(kept[n:]), ctx.backend
            )
            return None, None, *operator.spread(gradients), *[None] * len(ctx.options)
        gradients = ctx.context.run(
            operator._dispatch_backward, douts, kept, ctx.options, ctx.backend
        )
        # None: it is absent
        wanted = zip(operator.spread(gradients), ctx.needs_input_grad[2:], strict=False)
        return (
            None,
            None,
            *[x if needed else None for x, needed in wanted],
            *[None] * len(ctx.options),
        )
