"""Delta-rule models of transformers compute the same with our operations in place of their own."""

import math
import threading
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from delta_trn import (
    BackendRefusal,
    check_packing,
    checking,
    patch_transformers,
)
from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.backends.gated_delta_rule.chunked import note
from delta_trn.backends.parity.judge import error
from delta_trn.models.cache import CACHE_NAME
from delta_trn.models.ecosystem import patching
from delta_trn.models.ecosystem.operations import replacements
from tests.support.families import FAMILIES, INDEXED, KIMI, make, stack, tokens
from tests.support.tiny_models import assert_same

# One operation sums float32 in another order. A planted fault of 1% is a thousand times as large.
ALLOWED = 2**-18


class InFloat64(TorchFunctionMode):
    """Turns every float32 that transformers' code asks for into float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wide = {torch.float32: torch.float64, torch.float: torch.float64}
        named = {
            k: wide.get(x, x) if isinstance(x, torch.dtype) else x
            for k, x in (kwargs or {}).items()
        }
        values = [wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        return (torch.Tensor.double if function is torch.Tensor.float else function)(
            *values, **named
        )


def forward_backward(model, ids, **options):
    """Returns the logits of real tokens and the gradient of every parameter; 0 is padding."""
    model.zero_grad()
    logits = model(ids, use_cache=False, **options).logits
    real = ids.ne(0)
    rows, following = (
        logits[:, :-1][real[:, :-1] & real[:, 1:]],
        ids[:, 1:][real[:, :-1] & real[:, 1:]],
    )
    F.cross_entropy(rows, following).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits[real].detach(), **gradients}


def padded(side):
    """Returns two rows, the second shorter by 30 tokens, and the arguments that say so."""
    ids = tokens(2, 70)
    if side is None:
        return ids, {}
    ids[1, slice(30) if side == "left" else slice(-30, None)] = 0
    return ids, {"attention_mask": ids.ne(0).long()}


def errors(results, judge):
    assert results.keys() == judge.keys() and any("conv1d" in name for name in judge)
    return {name: error(results[name], x) for name, x in judge.items() if x.any()}


@pytest.mark.parametrize("side", [None, "left", "right"])
class TestGradients:
    """The judge is transformers' own code in float64, without the patch."""

    def test_in_float64_logits_and_every_gradient_are_those_of_transformers(self, model, side):
        ids, options = padded(side)
        with InFloat64():
            judge = forward_backward(model.double(), ids, **options)
            with patch_transformers(model, backend="chunked"):
                results = forward_backward(model, ids, **options)
        model.float()
        assert judge["logits"].dtype == torch.float64
        worst = max(errors(results, judge).items(), key=lambda item: item[1])
        assert worst[1] < 1e-10, worst

    def test_in_float32_they_err_as_little_as_those_of_transformers(self, model, side):
        ids, options = padded(side)
        with InFloat64():
            judge = forward_backward(model.double(), ids, **options)
        theirs = errors(forward_backward(model.float(), ids, **options), judge)
        with patch_transformers(model, backend="chunked"):
            ours = errors(forward_backward(model, ids, **options), judge)
        excess = {name: ours[name] / max(theirs[name], 2**-20) for name in ours}
        assert max(excess.values()) < 4, max(excess.items(), key=lambda item: item[1])


def packed():
    """Returns what tells of two rows, each with two sequences, and padding behind the second."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 17:] = 0
    return {
        "position_ids": torch.tensor([[*range(7), *range(13)], [*range(12), *range(8)]]),
        "attention_mask": mask,
    }


def compare_compiled(model, compiler, how, options):
    """Asserts that a compiled patched model has the loss and gradients of the same model, not
    compiled.

    The whole model is one graph. Compiled code may round differently: as far as it does without the
    patch.
    """
    experts, model.config._experts_implementation = (
        model.config._experts_implementation,
        "batched_mm",
    )
    ids, differences = tokens(2, 20), []
    for control in (False, True)[: 2 if compiler == "inductor" else 1]:
        with nullcontext() if control else patch_transformers(model, backend="chunked"):
            expected = forward_backward(model, ids, **options)
            torch.compiler.reset()
            parts = [model] if how == "whole" else list(stack(model).layers)
            try:
                for part in parts:  # Qwen4-exp's own sparse attention breaks graphs
                    part.compile(
                        backend=compiler, fullgraph=not model.config.model_type.startswith("qwen4")
                    )
                differences.append(
                    max(errors(forward_backward(model, ids, **options), expected).values())
                )
            finally:
                for part in parts:
                    part._compiled_call_impl = None
                torch.compiler.reset()
    model.config._experts_implementation = experts
    assert differences[0] <= 8 * max(2**-20, differences[-1] if len(differences) > 1 else 0)


@pytest.mark.parametrize("family", ["kimi_linear", INDEXED])
def test_a_model_in_float64_whose_gates_are_float32_computes(family):
    """Kimi Linear and GLM-5 Next make decays in float32, whatever their dtype is."""
    model, ids = make(family).double(), tokens(2, 70)
    expected = forward_backward(model, ids)
    with patch_transformers(model, backend="chunked"):
        found = forward_backward(model, ids)
        for steps in (1, 5):  # a token, and a sequence behind a cache
            cache = model(ids, use_cache=True)[CACHE_NAME]
            logits = model(tokens(2, steps), **{CACHE_NAME: cache}).logits
            assert logits.dtype == torch.float64 and logits.isfinite().all()
    assert found["logits"].dtype == torch.float64
    assert max(errors(found, expected).values()) < 2**-16


class TestFamilies:
    def test_gradients_of_a_packed_row_are_those_of_its_sequences_alone(self, packing_model):
        """Alone they are computed by transformers' own code, in float64."""
        model, ids, lengths = packing_model, tokens(1, 90), (7, 64, 19)
        parts = ids.split(lengths, dim=1)
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        model.double()
        with InFloat64():
            model.zero_grad()
            for part in parts:
                logits = model(part, use_cache=False).logits
                F.cross_entropy(logits[0, :-1], part[0, 1:], reduction="sum").backward()
            alone = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            model.zero_grad()
            with patch_transformers(model, backend="chunked"):
                logits = model(ids, position_ids=places, use_cache=False).logits
            inside = (places[0, 1:] > 0).nonzero()[:, 0]
            F.cross_entropy(logits[0, inside], ids[0, inside + 1], reduction="sum").backward()
        packed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        worst = max(errors(packed, alone).items(), key=lambda item: item[1])
        model.float()
        assert worst[1] < 1e-10, worst

    @pytest.mark.parametrize(
        "how", [{"num_beams": 1}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
    )
    def test_generation_after_left_padding_gives_the_same_tokens(self, model, how):
        ids = tokens(2, 9)
        ids[0, :4] = 0
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": ids.ne(0), **how}
        expected = model.generate(ids, **options)
        with patch_transformers(model, backend="chunked"):
            assert torch.equal(model.generate(ids, **options), expected)

    def test_a_decay_that_is_off_by_a_hundredth_is_found(self):
        ids, model = tokens(2, 11), make("qwen3_next")
        expected = forward_backward(model, ids)["logits"]
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.data += math.log(1.01)
        with patch_transformers(model, backend="chunked"):
            assert error(forward_backward(model, ids)["logits"], expected) > 100 * ALLOWED

    @torch.no_grad()
    def test_several_tokens_after_a_cache_are_read_like_one(self, model):
        prompt, more = tokens(1, 8), tokens(1, 12)[:, 4:]
        logits = []
        with patch_transformers(model, backend="chunked"):
            for count in (1, 8):
                cache = DynamicCache(config=model.config)
                model(prompt, past_key_values=cache, use_cache=True)
                logits.append(
                    model(more[:, :count], past_key_values=cache, use_cache=True).logits[:, 0]
                )
        assert error(*logits) < 2**-16

    @pytest.mark.parametrize(
        ("family", "rule"),
        [("qwen3_next", "gated_delta_rule"), ("kimi_linear", "kimi_delta_attention")],
    )
    def test_triton_runs_in_a_model(self, family, rule):
        ids, model = tokens(1, 11), make(family)
        expected = forward_backward(model, ids)
        with patch_transformers(model, backend="triton") as patch:
            assert f"triton for {rule}" in str(patch)
            results = forward_backward(model, ids)
        errors = {name: error(results[name], x) for name, x in expected.items() if x.any()}
        assert max(errors.values()) < 2**-14, max(errors.items(), key=lambda item: item[1])

    @pytest.mark.parametrize("family", KIMI)
    def test_a_bfloat16_model_with_a_float32_convolution_errs_as_little_as_theirs(self, family):
        ids, model = tokens(2, 70), make(family)
        with torch.no_grad():
            expected = model(ids).logits
            for name, parameter in model.named_parameters():
                kept = type(model)._keep_in_fp32_modules_strict or ()  # "conv1d" in two families
                if not any(part in name for part in kept):
                    parameter.data = parameter.bfloat16()
            theirs = error(model(ids).logits, expected)
            with patch_transformers(model, backend="chunked") as patch:
                assert ("A_log is float32 now" in str(patch)) == (family == "kimi_linear")
                assert error(model(ids).logits, expected) < 1.5 * theirs


class TestCompile:
    @pytest.mark.parametrize(
        "family",
        [
            pytest.param(name, marks=pytest.mark.slow) if name in ("qwen4_exp", INDEXED) else name
            for name in FAMILIES
        ],
    )
    def test_torch_compile_takes_a_packed_and_padded_batch_without_a_break(self, family):
        options = padded("left")[1] if family == INDEXED else packed()
        compare_compiled(make(family), "eager", "whole", options)

    @pytest.mark.slow
    @pytest.mark.parametrize("told", ["plain", "places", "packed"])
    @pytest.mark.parametrize("how", ["whole", "by layer"])
    @pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
    def test_every_way_to_compile_gives_the_same_loss_and_gradients(
        self, model, compiler, how, told
    ):
        options = {
            "plain": {},
            "places": {"position_ids": torch.arange(20).expand(2, -1)},
            "packed": packed(),
        }
        compare_compiled(model, compiler, how, options[told])

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [{}, packed()], ids=["plain", "packed"])
    def test_the_patch_adds_no_break_to_a_model_that_has_some(self, options):
        model, breaks = make("qwen4_exp"), []
        for patched in (False, True):
            with patch_transformers(model, backend="chunked") if patched else nullcontext():
                torch.compiler.reset()
                found = torch._dynamo.explain(model)(tokens(2, 20), use_cache=False, **options)
                breaks.append(found.graph_break_count)
        assert breaks[0] == breaks[1] > 0

    def test_a_compiled_model_refuses_packed_sequences_with_a_cache(self):
        ids, dense = tokens(2, 20), make("qwen3_5")
        with patch_transformers(dense, backend="chunked"), torch.no_grad():
            try:
                compiled = torch.compile(dense, backend="eager")
                assert (
                    compiled(ids, position_ids=torch.arange(20)[None], use_cache=True)[CACHE_NAME]
                    is not None
                )
                with pytest.raises(RuntimeError, match="use_cache=False"):
                    compiled(ids, use_cache=True, position_ids=packed()["position_ids"])
            finally:
                torch.compiler.reset()


class TestPatch:
    def test_the_report_names_every_layer_and_its_kernels_and_is_printed(self, qwen, capsys):
        with patch_transformers(qwen, backend="chunked") as patch:
            (row,) = patch.rows
        assert row.name == "model.layers.0.linear_attn" and set(row.kernels.values()) == {"chunked"}
        assert capsys.readouterr().out.strip() == str(patch)
        assert f"gated_delta_rule by chunked ({note()})" in str(patch)

    @pytest.mark.parametrize(
        ("family", "settings", "safe"),
        [
            ("kimi_linear", {}, False),
            ("glm5_next", {}, True),
            ("glm5_next", {"linear_lower_bound": -6.0}, False),
            ("bailing_hybrid", {}, True),
            ("bailing_hybrid", {"kda_safe_gate": False}, False),
        ],
        ids=str,
    )
    def test_a_bounded_decay_is_promised_where_the_config_bounds_it(
        self, family, settings, safe, monkeypatch
    ):
        """Patched as a model and as a family: what the rule is told, and what the report says."""
        told, forward = [], chunked.forward

        def watch(call, *, save):
            told.append(call.lower_bound)
            return forward(call, save=save)

        monkeypatch.setattr(chunked, "forward", watch)
        model, ids = make(family, **settings), tokens(1, 20)
        for patched in (model, None):
            with checking(), patch_transformers(patched, backend="chunked"):
                model(ids)
        assert told == [-5.0 if safe else None] * 2
        patch = patch_transformers(model, backend="triton")
        patch.undo()
        assert (patching.UNBOUNDED in str(patch)) == (not safe)
        assert "triton for kimi_delta_attention, kimi_delta_attention_step" in str(patch)

    def test_undo_restores_every_forward(self, qwen):
        layer = qwen.model.layers[0].linear_attn
        before = layer.forward, qwen.model.forward
        patch = patch_transformers(qwen, backend="chunked")
        assert layer.forward != before[0] and qwen.model.forward != before[1]
        patch.undo()
        patch.undo()
        assert (layer.forward, qwen.model.forward) == before
        assert not check_packing(qwen)

    def test_without_a_model_every_family_is_patched_also_in_models_made_later(self, qwen):
        with patch_transformers(backend="chunked") as patch:
            rows = {row.name: row for row in patch.rows}
            assert rows["qwen3_next"].kernels["gated_delta_rule"] == "chunked"
            assert check_packing(qwen) and check_packing(make("qwen3_next"))
        assert not check_packing(qwen) and not check_packing(make("qwen3_next"))
        assert rows["kimi_linear"].kernels["kimi_delta_attention"] == "chunked"

    def test_only_the_model_that_was_given_is_patched(self, qwen):
        other = make("qwen3_next")
        with patch_transformers(qwen, backend="chunked"):
            assert check_packing(qwen) and not check_packing(other)

    def test_patched_models_run_in_threads(self, qwen):
        with patch_transformers(qwen, backend="chunked"):
            logits = lambda: qwen(tokens(1, 9), use_cache=False).logits.detach()  # noqa: E731
            expected, results = logits(), []
            work = lambda: results.append(logits())  # noqa: E731
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(results) == 3 and all(torch.equal(x, expected) for x in results)

    def test_a_family_that_this_transformers_lacks_is_reported(self, monkeypatch):
        monkeypatch.setitem(patching.FAMILIES, "no_such_family", "gated_delta_rule")
        with patch_transformers() as patch:
            reasons = {row.name: row.reason for row in patch.rows}
        assert reasons["no_such_family"] == "this transformers does not have it"

    def test_a_model_without_a_layer_is_refused_with_the_families(self):
        with pytest.raises(ValueError, match=r"Linear has no Gated DeltaNet or .*qwen3_next"):
            patch_transformers(torch.nn.Linear(2, 2))

    def test_a_backend_that_cannot_run_is_refused_with_the_layer_and_the_reason(self, qwen):
        before = qwen.model.layers[0].linear_attn.forward
        with pytest.raises(
            BackendRefusal,
            match=r"layers\.0\.linear_attn: left as it is: (?s:.*)tensors are on cpu",
        ):
            patch_transformers(qwen, backend="nki")
        assert qwen.model.layers[0].linear_attn.forward == before

    def test_a_model_without_memory_is_patched_and_computes_once_it_has_weights(self, qwen):
        expected = qwen(tokens(1, 6)).logits
        with torch.device("meta"):
            empty = type(qwen)(qwen.config).eval()
        for backend in ("chunked", None):
            with patch_transformers(empty, backend=backend) as patch:
                assert "not in memory" in str(patch)
        with patch_transformers(empty, backend="chunked"):
            full = empty.to_empty(device="cpu")
            full.load_state_dict(qwen.state_dict())
            full.model.rotary_emb.load_state_dict(qwen.model.rotary_emb.state_dict())
            for buffer, value in zip(full.buffers(), qwen.buffers(), strict=True):
                buffer.copy_(value)
            assert_same(full(tokens(1, 6)).logits, expected)

    def test_an_exception_leaves_nothing_patched(self, qwen, monkeypatch):
        layers = [m for m in qwen.modules() if type(m).__name__.endswith("GatedDeltaNet")]
        before = [layer.forward for layer in layers]
        monkeypatch.setattr(patching, "check_weights", lambda layer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            patch_transformers(qwen, backend="chunked")
        assert [layer.forward for layer in layers] == before

    def test_a_second_patch_of_a_model_is_refused_and_the_first_one_stays(self, qwen):
        with patch_transformers(qwen, backend="chunked"):
            patched = qwen.model.layers[0].linear_attn.forward
            with pytest.raises(ValueError, match=r"patched already; call undo\(\)"):
                patch_transformers(qwen)
            assert qwen.model.layers[0].linear_attn.forward == patched


class TestOurModels:
    def test_the_loss_divided_by_all_items_adds_up_over_micro_batches(self, ours):
        ids = tokens(4, 12)
        labels = ids.clone()
        labels[0, :9] = labels[3] = -100
        whole, items = ours(ids, labels=labels).loss, (labels[:, 1:] != -100).sum()
        parts = [
            ours(ids[i], labels=labels[i], num_items_in_batch=items).loss
            for i in ([0], [1, 2], [3])
        ]
        assert_same(sum(parts), whole)

    def test_the_loss_of_packed_rows_leaves_out_what_follows_a_sequence(self, ours):
        ids = tokens(2, 20)
        places = torch.tensor([[*range(7), *range(13)], [*range(20)]])
        labels = ids.clone()
        parts = [(ids[0, :7], 6), (ids[0, 7:], 12), (ids[1], 19)]
        expected = sum(n * ours(x[None], labels=x[None]).loss for x, n in parts) / 37
        assert_same(ours(ids, labels=labels, position_ids=places).loss, expected)

    def test_places_of_padding_do_not_pack(self, ours):
        ids, mask = tokens(1, 5), torch.tensor([[0, 0, 1, 1, 1]])
        expected = ours(ids, attention_mask=mask).logits
        places = torch.tensor([[1, 1, 0, 1, 2]])
        assert torch.equal(ours(ids, attention_mask=mask, position_ids=places).logits, expected)

    def test_unknown_arguments_of_forward_are_refused_by_name(self, ours):
        with pytest.raises(TypeError, match="labelz"):
            ours(tokens(1, 3), labelz=tokens(1, 3))
        ours(tokens(1, 3), output_attentions=False, token_type_ids=None)


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


class TestFunctions:
    """The shapes are those of transformers' own tests of its linear attention."""

    @pytest.mark.parametrize("backend", ["chunked", pytest.param("triton", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("state", [False, True])
    @pytest.mark.parametrize("T", [1, 3, 12, 13])
    @pytest.mark.parametrize(
        ("home", "names"),
        [
            ("qwen3_next.modeling_qwen3_next", "torch_{}_gated_delta_rule"),
            ("kimi_linear.modeling_kimi_linear", "{}_kimi_delta_attention"),
        ],
    )
    def test_our_rules_agree_with_those_of_transformers(self, home, names, T, state, backend):
        theirs, ours = vars(import_module(f"transformers.models.{home}")), replacements(backend)
        chunk, recurrent = names.format("chunk"), names.format("recurrent")
        tensors, options = rule_arguments(T, 3, 3, 8, 16, state)
        if "kimi" in names:
            channels = torch.rand(8, generator=torch.Generator().manual_seed(0))
            options["g"] = options["g"][..., None] * channels
        results = [
            ours[chunk](*tensors, **options),
            ours[recurrent](*tensors, **options),
            theirs[chunk](*tensors, chunk_size=4, **options),
        ]
        expected = theirs[recurrent](*tensors, **options)
        assert all(
            error(x, y) < ALLOWED for pair in results for x, y in zip(pair, expected, strict=True)
        )

    @pytest.mark.parametrize("activation", ["silu", None, "gelu"])
    @pytest.mark.parametrize("bias", [False, True])
    def test_our_convolutions_agree_with_those_of_transformers(self, bias, activation):
        theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        ours = replacements("chunked")
        generator = torch.Generator().manual_seed(0)
        x, weight, offset, state = (
            torch.randn(shape, generator=generator)
            for shape in ((2, 6, 9), (6, 4), (6,), (2, 6, 4))
        )
        options = {"bias": offset if bias else None, "activation": activation}
        y = theirs.causal_conv1d_fn(x, weight, **options)
        assert error(ours["causal_conv1d_fn"](x, weight, **options), y) < ALLOWED
        states = state.clone(), state.clone()
        y = theirs.causal_conv1d_update(x[..., :1], states[0], weight, **options)
        assert (
            error(ours["causal_conv1d_update"](x[..., :1], states[1], weight, **options), y)
            < ALLOWED
        )
        assert torch.equal(*states)
