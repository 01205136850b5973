"""Cuts sequences into chunks of C tokens that lie together, and joins them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Maps tokens to chunks, [chunks, heads, C, ...]; no chunk holds tokens of two sequences.

    All states lie together, [N + chunks, heads, K, V]: each sequence's first, then each chunk's last.

    active      for each c, how many sequences have a c-th chunk; those chunks lie together, longest first
    order       the sequences, longest first; like the fields below, None where all have length T
    tokens      [chunks C] the token at each place, T where there is none
    places      [T] the place of each token
    first       [chunks heads] where each row's first state lies; None: row i's is state i
    last        [N] where each sequence's last state lies
    """

    B: int
    T: int
    C: int
    heads: int
    active: list[int]
    order: Tensor | None = None
    tokens: Tensor | None = None
    places: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of all sequences."""
        return sum(self.active)

    @property
    def N(self) -> int:
        """Returns the number of sequences."""
        return self.B if self.order is None else self.order.shape[0]

    def sorted(self, states: Tensor) -> Tensor:
        """Returns states [N, ...] in the order of the layout."""
        return states if self.order is None else states[self.order]

    def in_call_order(self, states: Tensor) -> Tensor:
        """Returns states [N, ...] as a new tensor, in the order in which the call has the sequences."""
        return states.clone() if self.order is None else states[self.order.argsort()]

    def firsts(self, states: Tensor, rows: slice) -> Tensor:
        """Returns the first states of `rows`, any of [chunks heads], from all states [(N + chunks) heads]."""
        return states[rows if self.first is None else self.first[rows]]

    def put_firsts(self, states: Tensor, rows: slice, values: Tensor) -> None:
        """Stores the states that `firsts` returns."""
        states[rows if self.first is None else self.first[rows]] = values

    def lasts(self, states: Tensor) -> Tensor:
        """Returns the sequences' last states [N, ...] as a new tensor, in the call's order."""
        return self.in_call_order(states[self.chunks :] if self.last is None else states[self.last])

    def spans(self, most: int) -> list[tuple[slice, list[tuple[slice, slice, slice]]]]:
        """Returns all rows in the order of time, in spans of at most `most` rows unless one c has more.

        A span is a slice of the rows [chunks heads] and a list with three slices for each c in it: the rows
        of the c-th chunks, and those of their first and last states in [(N + chunks) heads].
        """
        spans: list[tuple[slice, list[tuple[slice, slice, slice]]]] = []
        first, start = 0, 0
        for n in self.active:
            rows, before, after = (
                slice(x * self.heads, (x + n) * self.heads) for x in (start, first, self.N + start)
            )
            if spans and rows.stop - spans[-1][0].start <= most:
                span, steps = spans[-1]
                spans[-1] = slice(span.start, rows.stop), [*steps, (rows, before, after)]
            else:
                spans.append((rows, [(rows, before, after)]))
            first, start = self.N + start, start + n
        return spans

    def put_lasts(self, states: Tensor, values: Tensor | None) -> None:
        """Stores the states that `lasts` returns; None stands for zeros."""
        if values is None:
            values = states.new_zeros((self.N, *states.shape[1:]))
        elif self.order is not None:
            values = values[self.order]
        if self.last is None:
            states[self.chunks :] = values
        else:
            states[self.last] = values.to(states.dtype)

    def split(self, x: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """Copies x [B, T, H, ...] times `factor` into out [chunks, H, group, C, ...].

        Places without a token become 0.
        """
        if self.tokens is not None:
            x = torch.cat([x[0], x.new_zeros((1, *x.shape[2:]))])[self.tokens].unflatten(0, (-1, self.C))
            _copy(x.transpose(1, 2).unsqueeze(2), out, factor)
            return out
        n, tail = divmod(self.T, self.C)
        out = out.unflatten(0, (-1, self.B))
        if n:
            whole = x[:, : n * self.C].unflatten(1, (n, self.C)).transpose(0, 1).transpose(2, 3)
            _copy(whole.unsqueeze(3), out[:n], factor)
        if tail:
            _copy(x[:, n * self.C :].transpose(1, 2).unsqueeze(2), out[n][:, :, :, :tail], factor)
            out[n][:, :, :, tail:].zero_()
        return out.flatten(0, 1)

    def join(self, y: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """Copies y [chunks, H, C, ...] times `factor` back into out [B, T, H, ...]."""
        if self.places is not None:
            y = y.transpose(1, 2).flatten(0, 1)[self.places]
            _copy(y.unsqueeze(0), out, factor)
            return out
        n, tail = divmod(self.T, self.C)
        y = y.unflatten(0, (-1, self.B))
        if n:
            _copy(
                y[:n].transpose(2, 3).transpose(0, 1),
                out[:, : n * self.C].unflatten(1, (n, self.C)),
                factor,
            )
        if tail:
            _copy(y[n][:, :, :tail].transpose(1, 2), out[:, n * self.C :], factor)
        return out


def _copy(x: Tensor, out: Tensor, factor: float) -> None:
    """Computes out = factor x in the wider of the two dtypes."""
    if factor == 1.0:
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.mul(x, factor, out=out)
    elif x.element_size() < out.element_size():
        out.copy_(x).mul_(factor)
    else:
        out.copy_(x * factor)


def lay_out(B: int, T: int, C: int, heads: int, cu_seqlens: Tensor | None) -> Layout:
    """Returns the layout of B sequences of T tokens, or of the packed ones, in rows of one head each."""
    if cu_seqlens is None:
        return Layout(B, T, C, heads, [B] * (-(-T // C)))
    bounds = cu_seqlens.cpu()
    starts, lengths = bounds[:-1], bounds.diff()
    counts = (lengths + C - 1) // C
    order = torch.argsort(counts, descending=True, stable=True)
    steps = int(counts.max())
    active = [int((counts > step).sum()) for step in range(steps)]
    sequences, chunk_step = [], []
    for step, n in enumerate(active):
        sequences.append(order[:n])
        chunk_step.append(torch.full((n,), step))
    empty = torch.zeros(0, dtype=torch.int64)
    sequence = torch.cat(sequences) if sequences else empty
    offset = (torch.cat(chunk_step) if chunk_step else empty)[:, None] * C + torch.arange(C)
    inside = offset < lengths[sequence][:, None]
    tokens = torch.where(inside, starts[sequence][:, None] + offset, T).flatten()
    places = torch.empty(T + 1, dtype=torch.int64)
    places[tokens] = torch.arange(tokens.numel())
    lies, starts_at = torch.arange(len(order)), len(order)
    before = []
    for n in active:
        before.append(lies[:n].clone())
        lies[:n] = torch.arange(starts_at, starts_at + n)
        starts_at += n
    chunk_first = torch.cat(before) if before else empty
    first_rows = (chunk_first[:, None] * heads + torch.arange(heads)).flatten()
    indices = (order, tokens, places[:T], first_rows, lies)
    return Layout(B, T, C, heads, active, *(x.to(cu_seqlens.device) for x in indices))


def capacity(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> int:
    """Returns how many chunks there may be, without looking at the data."""
    return B * (-(-T // C)) if cu_seqlens is None else T // C + cu_seqlens.shape[0] - 1
