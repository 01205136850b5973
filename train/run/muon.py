"""Muon: hidden matrices move by orthogonal matrices, everything else as AdamW moves it.

Per block X of a matrix, with gradient G and momentum u:

    u  <- momentum u + G
    O  =  U V^T  of  G + momentum u = U S V^T             by five Newton-Schulz steps
    X  <- (1 - lr weight_decay) X - 0.2 sqrt(max(rows, columns)) lr O

A block is one head's rows of the projections to q, k, v and the output gate, one head's columns of
the output projection, and any other matrix whole. The factor gives an update the root mean square
0.2 lr, about what AdamW's has (arXiv:2502.16982), so that both take one learning rate.
torch.optim.Muon knows neither heads nor AdamW's part.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

_many: Any = torch  # whose stubs leave out what works on many tensors at once

# of x (A + B x^2 + C x^4), which takes singular values from 0.01 to 1 close to 1 in five steps
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
MATCHES_ADAMW = 0.2


class Muon(AdamW):
    """AdamW, except for groups with `momentum`.

    Such a group has `heads`, the number of blocks of each matrix, and `of_columns`, whether they
    divide its columns rather than its rows.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all parameters that have a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                alike[p.shape].append(p)
        for matrices in alike.values():
            gradients: list[Tensor] = [p.grad for p in matrices]  # type: ignore[misc]
            for p in matrices:
                if not self.state[p]:
                    # AdamW looks for `step` in every state when it loads one
                    self.state[p] |= {
                        "step": torch.zeros((), device=p.device),
                        "momentum": torch.zeros_like(p),
                    }
            momenta = [self.state[p]["momentum"] for p in matrices]
            _many._foreach_mul_(momenta, group["momentum"])
            _many._foreach_add_(momenta, gradients)
            directions = torch.stack(
                _many._foreach_add(gradients, momenta, alpha=group["momentum"])
            )
            blocks = cut(directions, group["heads"], group["of_columns"])
            size = MATCHES_ADAMW * max(blocks.shape[-2:]) ** 0.5
            blocks.copy_(orthogonalize(blocks))  # a view of `directions`
            _many._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            _many._foreach_add_(matrices, list(directions), alpha=-group["lr"] * size)


def cut(x: Tensor, heads: int, of_columns: bool) -> Tensor:
    """Returns matrices [n, rows, columns] as a view of blocks,
    [n, heads, rows, columns] of a head.
    """
    if of_columns:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)
    return x.unflatten(1, (heads, -1))


def orthogonalize(x: Tensor) -> Tensor:
    """Returns about U V^T of each x [..., rows, columns] = U S V^T: singular values from 0.7 to
    1.2, 0 at 0.

    >>> x = torch.diag(torch.tensor([3.0, -2.0]))
    >>> bool((orthogonalize(x).diag().abs() - 1).abs().max() < 0.32)
    True
    """
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    y = wide.reshape(-1, *wide.shape[-2:])
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    for _ in range(STEPS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), y, beta=A)
    y = y.view(wide.shape)
    return y.mT if tall else y
