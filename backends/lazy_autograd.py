"""The gated delta rule on XLA's lazy tensors, without a custom operator around the adapters.

Inside a custom operator lazy tensors are no longer functionalized (torch 2.9): a write into a view does not
reach what it is a view of. The chunked adapter, which fills one buffer block by block, then returned zeros in
place of outputs, and no error. XLA traces what it is given anyway, so nothing is lost by calling it directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends import checks
from backends.registry import Options, adapter


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
    save: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """o and final_state by the named backend; shapes as in `backends.gated_delta_rule`."""
    return _Rule.apply(q, k, v, g, beta, initial_state, cu_seqlens, options, save, backend)  # type: ignore[no-any-return]


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        options: Options,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        checks.values(
            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state},
            cu_seqlens,
            normalized_inside=options.use_qk_l2norm_in_kernel,
            T=q.shape[1],
        )
        with torch.autocast(q.device.type, enabled=False):
            o, state, saved = adapter(backend).forward(
                q, k, v, g, beta, initial_state, cu_seqlens, options, save=save
            )
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, *saved)
        ctx.options, ctx.backend = options, backend
        ctx.set_materialize_grads(False)
        return o, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, g, beta, initial_state, cu_seqlens, *saved = ctx.saved_tensors
        if do is None:
            do = v.new_zeros(v.shape)
        with torch.autocast(q.device.type, enabled=False):
            gradients = adapter(ctx.backend).backward(
                do, dstate, q, k, v, g, beta, initial_state, cu_seqlens, saved, ctx.options
            )
        return *gradients, None, None, None, None
