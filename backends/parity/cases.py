"""Judges a case of an operation that has a formula: in float64, and at the case's precision for
samples.

    judge       the formula in float64, under autograd; that of a layer has the literal recurrence
                inside
    samples     the formula in float32 with results rounded to the dtype: once to the nearest, and
                once for each of `chunks` with rounding errors drawn at random

`layer_cases` and `mixer_cases` have the operations. Inputs are the same on every machine, as in
`rule_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from delta_trn.backends.parity.baseline import CHUNK, Noise, Rounding
from delta_trn.backends.parity.judge import Reference, Spread, Verdict, absolute
from delta_trn.backends.parity.tables import Tables, judges_functions

# roundings in a row of a gradient: through SiLU, the norm and its gain, or through a residual
STEPS = 24

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Holds the tensors of a case under the operation's names, and the gradients of its outputs."""

    case: Any
    tensors: dict[str, Tensor]
    douts: dict[str, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Returns the same with every tensor changed."""
        tensors, douts = ({n: change(y) for n, y in x.items()} for x in (self.tensors, self.douts))
        return replace(self, tensors=tensors, douts=douts)

    def double(self) -> Inputs:
        """Returns the same numbers in float64, as the judge reads them."""
        return self.map(lambda y: y.double() if y.is_floating_point() else y)


@dataclass(frozen=True)
class Operation:
    """Says how the cases of an operation are made, computed and judged.

    inputs      (case, dtype) -> its tensors: activations in `dtype`, the rest in float32 at least
    formula     (case, tensors, rounding, tokens of a chunk or None) -> outputs by name, literally
    run         (case, tensors, backend) -> outputs of the public operation
    terms       (case, result) -> how many float32 terms the result has added up
    parts       (case, result, judge's tensor) -> the number of its part for each index of its first
                axes
    split       (case, result, tensor) -> the tensors that are judged apart
    full        results in float32 at least, whatever the case's dtype
    rounded     whether intermediate results have the case's dtype
    """

    inputs: Callable[[Any, torch.dtype], Inputs]
    formula: Callable[..., dict[str, Tensor]]
    run: Callable[..., dict[str, Tensor]]
    terms: Callable[[Any, str], int]
    parts: Callable[[Any, str, Tensor], Tensor | None]
    split: Callable[[Any, str, Tensor], dict[str, Tensor]] = lambda case, name, y: {name: y}
    full: tuple[str, ...] = ()
    rounded: bool = False
    chunks: tuple[int, ...] = (CHUNK,) * 12
    seed: int = 12

    def outcome(self, x: Inputs, backend: str) -> dict[str, Tensor]:
        """Returns outputs and gradients by the public operation.
        Raises BackendRefusal where it refuses.
        """
        return self.differentiate(x, partial(self.run, backend=backend))

    def judge(self, x: Inputs) -> dict[str, Tensor]:
        """Returns the same by the formula in float64."""
        exact = Rounding(torch.float64)
        return self.differentiate(x.double(), partial(self.formula, rounding=exact, chunk=None))

    def samples(self, x: Inputs, *, inexact: bool = False) -> Iterator[dict[str, Tensor]]:
        """Yields the same by the formula at the precision of x.

        inexact     functions have the errors of tables, see `tables`
        """
        first = next(iter(x.tensors.values()))
        noise = Noise(
            self.seed, first.device, Tables(self.seed, len(self.chunks)) if inexact else None
        )
        for chunk, random in ((CHUNK, None), *((chunk, noise) for chunk in self.chunks)):
            if noise.tables is not None:
                noise.tables.begin(1)
            rounding = Rounding(first.dtype, random)
            yield self.differentiate(x, partial(self.formula, rounding=rounding, chunk=chunk))

    def differentiate(
        self, x: Inputs, compute: Callable[..., dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Returns the outputs of a computation and the gradients of its tensors."""
        leaves = {
            n: y.detach().clone().requires_grad_()
            for n, y in x.tensors.items()
            if y.is_floating_point()
        }
        outputs = compute(x.case, {**x.tensors, **leaves})
        grads = torch.autograd.grad(
            [outputs[name] for name in x.douts], list(leaves.values()),
            [dy.to(outputs[name].dtype) for name, dy in x.douts.items()], materialize_grads=True,
        )  # fmt: skip
        results = {name: y.detach() for name, y in outputs.items()}
        for name, grad in zip(leaves, grads, strict=True):
            results |= self.split(x.case, f"d{name}", grad)
        return results

    def verdicts(
        self, case: Any, dtype: torch.dtype, backend: str, device: str = "cpu"
    ) -> list[Verdict]:
        """Runs a backend on a case and judges every tensor.
        Raises BackendRefusal where it refuses.
        """
        x = self.inputs(case, dtype)
        results = self.outcome(x.map(lambda y: y.to(device)), backend)  # first, since it may refuse
        judge = self.judge(x)
        full = dict.fromkeys(self.full, torch.float32)
        spreads = {
            name: Spread(y, self.parts(case, name, y), absolute(full.get(name, dtype)))
            for name, y in judge.items()
        }
        for sample in self.samples(x, inexact=judges_functions(backend)):
            for name, spread in spreads.items():
                spread.add([sample[name]])
        rounded, verdicts = dtype if self.rounded else None, []
        for name in judge:
            terms = self.terms(case, name)
            expected = Reference(case.op, case.name, dtype, judge, spreads, terms, rounded)
            verdicts += expected.verdicts(backend, results, [name])
        return verdicts
