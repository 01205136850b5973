"""Our operations under the names and in the layouts of transformers' own.

A delta-rule layer of transformers looks four functions up in its module: the rule over a sequence,
that over a token, the short convolution, and that of a token. `replacements` returns ours by these
names. `gate_norm` is the forward of the norm behind Kimi Delta Attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from delta_trn.backends import (
    gated_delta_rule,
    gated_delta_rule_step,
    gated_rms_norm,
    kimi_delta_attention,
    kimi_delta_attention_step,
    short_convolution,
)
from delta_trn.backends.gated_delta_rule.contract import state_dtype
from delta_trn.models.sequence import places_in_sequences


def replacements(backend: str | None, *, safe: bool = False) -> dict[str, Callable[..., Any]]:
    """Returns our functions by transformers' names; `backend` None: the tensors' device decides.

    safe    promises that the decays of Kimi Delta Attention are bounded, as its safe_gate does
    """
    scalar = gated_delta_rule
    channels = partial(kimi_delta_attention, safe_gate=True) if safe else kimi_delta_attention
    functions = {
        "torch_chunk_gated_delta_rule": partial(chunk_rule, scalar),
        "torch_recurrent_gated_delta_rule": partial(recurrent_rule, scalar, gated_delta_rule_step),
        "chunk_kimi_delta_attention": partial(chunk_rule, channels),
        "recurrent_kimi_delta_attention": partial(
            recurrent_rule, channels, kimi_delta_attention_step
        ),
        "causal_conv1d_fn": convolve,
        "causal_conv1d_update": convolve_token,
    }
    return {name: partial(function, backend=backend) for name, function in functions.items()}


def chunk_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    backend: str | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns o and the state of a rule of ours. Packed sequences have no state: a patched model
    refuses a cache with them.

    cu_seqlens, or cu_seq_lens_q    [N + 1] bounds over rows put end to end; or, while torch.compile
                                    traces, [B, T] places of tokens in their sequences
    """
    rows, tokens = query.shape[:2]
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    places: dict[str, Tensor] = {}
    if cu_seqlens is not None and cu_seqlens.dim() == 2:
        if g.dim() == 4:
            places = {"position": cu_seqlens}
        else:  # a decay of 0 forgets
            g = g.masked_fill((cu_seqlens == 0)[..., None], -torch.inf)
        cu_seqlens = None
    g, beta = _as_wide(query, g, beta)
    inputs = (query, key, value, g, beta)
    if cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            raise ValueError(
                "packed sequences cannot fill or continue a cache; "
                "pass use_cache=False, or one sequence per row"
            )
        cu_seqlens = cu_seqlens.long()
        inputs = tuple(x.flatten(0, 1)[None] for x in inputs)
    q, k, v, g, beta = inputs
    o, state = rule(
        *(q, k, v, g, beta),
        initial_state=None if initial_state is None else initial_state.to(state_dtype(query.dtype)),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        backend=backend,
        **places,
    )
    if cu_seqlens is not None:
        o = o[0].unflatten(0, (rows, tokens))
    return o, state


def recurrent_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    step: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    backend: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns o and the state after one token; more tokens, or no state,
    go the way of a sequence.
    """
    g, beta = _as_wide(query, g, beta)
    tensors = query, key, value, g, beta
    named: dict[str, Any] = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "backend": backend}
    if query.shape[1] != 1 or initial_state is None:
        named |= {
            "initial_state": initial_state,
            "output_final_state": output_final_state,
        } | options
        return chunk_rule(rule, *tensors, **named)
    o, state = step(
        *(x[:, 0] for x in tensors), initial_state.to(state_dtype(query.dtype)), **named
    )
    return o[:, None], state if output_final_state else None


def _as_wide(q: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gates in float64 beside a q of float64: some models make them in float32 always."""
    return (g.to(q.dtype), beta.to(q.dtype)) if q.dtype == torch.float64 else (g, beta)


def gate_norm(
    norm: Any, hidden_states: Tensor, gate: Tensor, *, backend: str | None = None
) -> Tensor:
    """Returns the RMS norm of a head's rows, times a gain and the sigmoid of a gate, for a module
    of transformers that has `weight` and `variance_epsilon`.
    """
    return gated_rms_norm(
        hidden_states, gate, norm.weight, eps=norm.variance_epsilon, activation="sigmoid",
        backend=backend,
    )  # fmt: skip


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    backend: str | None = None,
    **unused: Any,
) -> Tensor:
    """Returns the convolution of [B, C, T] in the same layout."""
    x, position = hidden_states.transpose(1, 2), None
    rows, tokens = x.shape[:2]
    if cu_seq_lens_q is not None:
        if cu_seq_lens_q.dim() == 2:  # places, as `chunk_rule` has them
            position = cu_seq_lens_q.flatten()
        else:
            position = places_in_sequences(cu_seq_lens_q.long(), (1, rows * tokens))[0]
        x = x.reshape(1, rows * tokens, -1)
    y = _convolve(x, weight, bias, activation, backend, position=position)
    return y.reshape(rows, tokens, -1).transpose(1, 2)


def convolve_token(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Returns the convolution of [B, C, T] after `conv_state`,
    which gets the last inputs in place.
    """
    taps = weight.shape[-1]
    prefix = (
        conv_state[..., conv_state.shape[-1] - taps + 1 :].transpose(1, 2).to(hidden_states.dtype)
    )
    y = _convolve(hidden_states.transpose(1, 2), weight, bias, activation, backend, prefix=prefix)
    joined = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(joined[..., -conv_state.shape[-1] :])
    return y.transpose(1, 2)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    backend: str | None,
    **options: Any,
) -> Tensor:
    """Returns the convolution [B, T, C]; SiLU is computed with it, another activation after it."""
    fused = bias is None and activation in ("silu", "swish")
    form: Literal["silu", "linear"] = "silu" if fused else "linear"
    y = short_convolution(x, weight, activation=form, backend=backend, **options)
    if fused:
        return y
    y = y if bias is None else y + bias
    return y if activation is None else ACT2FN[activation](y)
