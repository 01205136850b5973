"""Hugging Face's Qwen3-Next computes the same with our operations in place of its own.

The tests and their shapes are those of transformers for its linear attention.
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers.models.qwen3_next", reason="this transformers has no Qwen3-Next")

from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from delta_trn.backends import gated_delta_rule, gated_delta_rule_step, gated_rms_norm, short_convolution
from delta_trn.backends.parity.judge import error

# Two layers sum float32 in another order. A planted fault of 1% changes logits a hundred times as much.
ALLOWED = 2**-16
NAMES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn")


def positions(cu_seqlens):
    """Returns the index of each token in its own sequence."""
    return None if cu_seqlens is None else torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])


class Ours:
    """Has our operations under transformers' names and layouts, on one backend; `ran` names those called."""

    def __init__(self, backend):
        self.backend, self.ran = backend, set()

    def torch_chunk_gated_delta_rule(
        self, q, k, v, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, **rest,
    ):  # fmt: skip
        self.ran.add("chunk")
        return gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(), backend=self.backend,
        )  # fmt: skip

    def torch_recurrent_gated_delta_rule(
        self, q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        **rest,
    ):  # fmt: skip
        self.ran.add("step")
        state = initial_state
        if state is None:
            state = q.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
        outputs = []
        for t in range(q.shape[1]):
            token = (x[:, t] for x in (q, k, v, g, beta))
            o, state = gated_delta_rule_step(
                *token, state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, backend=self.backend
            )
            outputs.append(o)
        return torch.stack(outputs, dim=1), state if output_final_state else None

    def causal_conv1d_fn(self, x, weight, bias=None, activation=None, cu_seq_lens_q=None, **rest):
        assert bias is None and activation == "silu"
        self.ran.add("convolution")
        y = short_convolution(
            x.transpose(1, 2), weight, position=positions(cu_seq_lens_q), backend=self.backend
        )
        return y.transpose(1, 2)

    def norm(self, module, x, gate):
        self.ran.add("norm")
        return gated_rms_norm(x, gate, module.weight, eps=module.variance_epsilon, backend=self.backend)


# A test takes seconds in Triton's interpreter, so only the last test of this file runs it by default.
@pytest.fixture(params=["chunked", pytest.param("triton", marks=pytest.mark.slow)])
def ours(request):
    if request.param == "triton":
        pytest.importorskip("triton", reason="the triton extra is not installed")
    return Ours(request.param)


def install(ours, monkeypatch):
    for name in NAMES:
        monkeypatch.setattr(theirs, name, getattr(ours, name))
    norm = lambda module, x, gate: ours.norm(module, x, gate)  # noqa: E731 - a method has to be a function
    monkeypatch.setattr(theirs.Qwen3NextRMSNormGated, "forward", norm)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["linear_attention", "full_attention"],
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, hidden_act="silu", num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, mlp_only_layers=[0, 1],
        pad_token_id=None, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    for p in model.parameters():
        if p.dim() > 1:  # with an initial std of 0.02, linear attention hardly changes the logits
            torch.nn.init.normal_(p, std=0.3)
    return model


def tokens(*shape):
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def forward_backward(model, ids):
    """Returns the logits and the gradient of every parameter."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def test_logits_and_gradients_of_qwen3_next_are_those_of_transformers(model, ours, monkeypatch):
    ids = tokens(2, 11)
    expected = forward_backward(model, ids)
    install(ours, monkeypatch)
    results = forward_backward(model, ids)
    assert ours.ran == {"chunk", "convolution", "norm"}
    assert results.keys() == expected.keys() and any("linear_attn" in name for name in results)
    errors = {name: error(results[name], x) for name, x in expected.items() if x.any()}
    assert max(errors.values()) < ALLOWED, max(errors.items(), key=lambda item: item[1])


def test_a_decay_that_is_off_by_a_hundredth_changes_logits_of_qwen3_next(model, monkeypatch):
    ids = tokens(2, 11)
    expected = forward_backward(model, ids)
    ours = Ours("chunked")
    install(ours, monkeypatch)
    rule = ours.torch_chunk_gated_delta_rule
    monkeypatch.setattr(theirs, NAMES[0], lambda q, k, v, g, **options: rule(q, k, v, 1.01 * g, **options))
    assert error(forward_backward(model, ids)["logits"], expected["logits"]) > 4 * ALLOWED


def test_generation_of_qwen3_next_is_that_of_transformers(model, ours, monkeypatch):
    ids, options = tokens(2, 7), {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    install(ours, monkeypatch)
    assert torch.equal(model.generate(ids, **options), expected)
    assert ours.ran == {"chunk", "step", "convolution", "norm"}


@torch.no_grad()
def test_qwen3_next_reads_several_tokens_after_a_cache_like_one(model, ours, monkeypatch):
    install(ours, monkeypatch)
    prompt, more = tokens(1, 8), tokens(1, 12)[:, 4:]
    logits = []
    for count in (1, 8):
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache, use_cache=True)
        logits.append(model(more[:, :count], past_key_values=cache, use_cache=True).logits[:, 0])
    assert error(*logits) < ALLOWED


@torch.no_grad()
def test_packed_sequences_of_qwen3_next_have_the_logits_of_separate_ones(model, ours, monkeypatch):
    """transformers packs sequences end to end, without padding, only for its CUDA kernels."""
    parts = [tokens(1, 9)[:, :5], tokens(1, 9)[:, 5:6], tokens(1, 3)]
    alone = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
    bounds = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    install(ours, monkeypatch)
    packed = model(
        torch.cat(parts, dim=1), position_ids=positions(bounds)[None], use_cache=False,
        cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=5, max_length_k=5,
    ).logits  # fmt: skip
    assert error(packed, alone) < ALLOWED


def rule_arguments(T, H, HV, K, V, state):
    """Returns [q, k, v] and the keyword arguments of a rule."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = normal(2, T, H, K), normal(2, T, H, K), normal(2, T, HV, V)
    g, beta = -normal(2, T, HV).sigmoid(), normal(2, T, HV).sigmoid()
    return [q, k, v], {
        "g": g, "beta": beta, "initial_state": normal(2, HV, K, V) if state else None,
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("T", [3, 12, 13])
def test_our_rules_agree_with_the_chunked_and_recurrent_rules_of_transformers(T, state, ours):
    tensors, options = rule_arguments(T, 3, 3, 8, 16, state)
    results = [
        ours.torch_chunk_gated_delta_rule(*tensors, **options),
        ours.torch_recurrent_gated_delta_rule(*tensors, **options),
        theirs.torch_chunk_gated_delta_rule(*tensors, chunk_size=4, **options),
    ]
    expected = theirs.torch_recurrent_gated_delta_rule(*tensors, **options)
    assert all(error(x, y) < ALLOWED for pair in results for x, y in zip(pair, expected, strict=True))


def test_grouped_value_heads_equal_repeated_queries_and_keys(ours):
    (q, k, v), options = rule_arguments(13, 2, 6, 8, 16, False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outcomes = []
    for heads in ((q, k), tuple(x.repeat_interleave(3, dim=2) for x in (q, k))):
        o, state = ours.torch_chunk_gated_delta_rule(*heads, v, **options)
        outcomes.append([o, state, *torch.autograd.grad(o.sin().sum(), leaves)])
    assert all(error(x, y) < ALLOWED for x, y in zip(*outcomes, strict=True))


def test_triton_runs_in_qwen3_next(model, monkeypatch):
    ours = Ours("triton")
    test_logits_and_gradients_of_qwen3_next_are_those_of_transformers(model, ours, monkeypatch)
