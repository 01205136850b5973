"""The model as a function: identities in float64, other implementations, sizes and bad input."""

import doctest
import math
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from delta_trn.backends import gated_delta_rule, kimi_delta_attention
from delta_trn.backends.parity.judge import error
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.kimi_delta_attention import KimiDeltaAttention
from delta_trn.models.sequence import places_in_sequences
from tests.support.tiny_models import (
    VARIANTS,
    VOCABULARY,
    assert_same,
    config,
    model,
    packed,
    rows,
    tokens,
)

variants = pytest.mark.parametrize("variant", VARIANTS)


class TestLayer:
    @staticmethod
    def by_its_equations(layer: GatedDeltaNet, x: Tensor) -> Tensor:
        """Returns y [1, T, d] of x [1, T, d] by the docstring's equations;
        the judge computes the rule.
        """
        T, W = x.shape[1], layer.conv.weight.shape[1]
        qkv = torch.cat(
            [x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1
        ).mT
        taps = layer.conv.weight[:, None]
        qkv = F.silu(F.conv1d(qkv, taps, padding=W - 1, groups=len(taps))[..., :T]).mT
        sizes = (layer.K, layer.K, layer.V)
        parts = zip(qkv.split(layer.sizes, dim=-1), sizes, strict=True)
        q, k, v = (y.unflatten(-1, (-1, size)) for y, size in parts)
        beta, rule = layer.beta_max * (x @ layer.b_proj.weight.T).sigmoid(), gated_delta_rule
        if isinstance(layer, KimiDeltaAttention):
            (f0, f1), (g0, g1), rule = layer.f_proj, layer.g_proj, kimi_delta_attention
            f = (x @ f0.weight.T @ f1.weight.T + layer.dt_bias).unflatten(-1, (-1, layer.K))
            rate, bound = layer.A_log.exp()[:, None], layer.bound
            g = -rate * F.softplus(f) if bound is None else bound * (rate * f).sigmoid()
            gate = (x @ g0.weight.T @ g1.weight.T + g1.bias).sigmoid()
        else:
            g = -layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias)
            gate = F.silu(x @ layer.g_proj.weight.T)
        o, _ = rule(
            q,
            k,
            v,
            g,
            beta,
            scale=math.sqrt(layer.K),
            use_qk_l2norm_in_kernel=True,
            backend="recurrent",
        )
        gate = gate.unflatten(-1, (-1, layer.V))
        normalized = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-6) * layer.o_norm.weight
        return (normalized * gate).flatten(-2) @ layer.o_proj.weight.T

    @pytest.mark.parametrize("variant", ["gdn", "grouped", "untied", "kimi", "bounded"])
    @pytest.mark.parametrize("T", [1, 2, 3, 17])
    def test_forward_computes_the_equations_of_its_docstring(self, variant: str, T: int):
        layer = model(**VARIANTS[variant]).model.blocks[0].mixer
        x = torch.randn(1, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name.endswith("bias"):  # one starts at 0
                    parameter += torch.linspace(-1, 1, len(parameter), dtype=torch.float64)
            assert_same(layer(x, rows(T)), self.by_its_equations(layer, x))


class TestInfluenceOfTokens:
    @variants
    def test_a_changed_token_changes_nothing_before_it(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(2, 70)
        with torch.no_grad():
            before = m(ids).logits
            for t in (0, 1, 31, 63, 64, 69):
                other = ids.clone()
                other[:, t] = (ids[:, t] + 1) % VOCABULARY
                after = m(other).logits
                # not to the last bit: the rows of a matrix product may be blocked differently
                if t:
                    assert_same(after[:, :t], before[:, :t], what=f"before {t}")
                assert error(after[:, t:], before[:, t:]) > 1e-6, f"token {t} has no influence"
            assert torch.equal(m(inputs_embeds=m.model.embed(ids)).logits, before)

    @variants
    @pytest.mark.parametrize("lengths", [[1, 2, 3, 0, 4], [65, 1, 0, 0, 7]], ids=str)
    def test_packed_sequences_have_the_logits_of_separate_ones(
        self, variant: str, lengths: list[int]
    ):
        m = model(**VARIANTS[variant])
        cu_seqlens, places = packed(lengths)
        ids = tokens(1, sum(lengths))
        with torch.no_grad():
            together = m(ids, cu_seqlens=cu_seqlens).logits
            for place in places:
                if place.start < place.stop:
                    assert_same(together[:, place], m(ids[:, place]).logits, what=str(place))

    @variants
    def test_gradients_of_packed_sequences_are_those_of_separate_ones(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(1, 41)
        cu_seqlens, places = packed([5, 0, 35])
        inputs, targets = ids[:, :-1], ids[:, 1:]
        m.loss(inputs, targets, places_in_sequences(cu_seqlens, (1, 40))).backward()
        together = {name: p.grad.clone() for name, p in m.named_parameters()}
        m.zero_grad()
        for place in (places[0], places[2]):
            share = (place.stop - place.start) / 40
            (share * m.loss(inputs[:, place], targets[:, place])).backward()
        for name, p in m.named_parameters():
            assert_same(together[name], p.grad, what=name, factor=10)

    @variants
    @pytest.mark.parametrize("cuts", [[1], [64, 65], [3, 40, 41, 69]], ids=str)
    def test_forward_in_parts_equals_the_forward_of_the_whole(self, variant: str, cuts: list[int]):
        m, ids = model(**VARIANTS[variant]), tokens(2, 70)
        with torch.no_grad():
            whole, cache, logits = m(ids, use_cache=False).logits, None, []
            for part in ids.tensor_split(cuts, dim=1):
                output = m(part, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits.append(output.logits)
        assert_same(torch.cat(logits, dim=1), whole)
        assert cache is not None and cache.get_seq_length() == 70

    @variants
    def test_gradients_flow_through_the_cache(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(1, 12)
        m(ids, use_cache=False).logits[:, 6:].square().sum().backward()
        whole = {name: p.grad.clone() for name, p in m.named_parameters()}
        m.zero_grad()
        cache = m(ids[:, :6], use_cache=True).past_key_values
        m(ids[:, 6:], past_key_values=cache).logits.square().sum().backward()
        for name, p in m.named_parameters():
            assert_same(p.grad, whole[name], what=name, factor=10)


class TestPadding:
    MASK = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1, 1],
            [0, 0, 0, 1, 1, 1, 1, 1],  # left
            [1, 1, 0, 0, 0, 0, 0, 0],  # right
            [0, 1, 1, 0, 0, 1, 0, 1],  # between
            [0, 0, 0, 0, 0, 0, 0, 1],
        ]
    )

    @variants
    def test_padding_changes_no_logit_of_real_tokens(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(5, 8)
        with torch.no_grad():
            logits = m(ids, attention_mask=self.MASK).logits
            for i, mask in enumerate(self.MASK.bool()):
                assert_same(logits[i][mask], m(ids[i][mask][None]).logits[0], what=f"row {i}")
            assert torch.isfinite(logits).all()
            other = torch.where(self.MASK.bool(), ids, (ids + 7) % VOCABULARY)
            again = m(other, attention_mask=self.MASK).logits
        assert torch.equal(again[self.MASK.bool()], logits[self.MASK.bool()])

    @variants
    def test_padding_may_lie_in_any_part_of_a_forward_in_parts(self, variant: str):
        """In a conversation with turns of different lengths,
        whole rows of a part may be padding.
        """
        m = model(**VARIANTS[variant])
        ids = tokens(5, 25)
        masks = torch.cat([self.MASK, self.MASK.flip(0), torch.ones(5, 1).int(), self.MASK], 1)
        masks[1, 8:16] = 0
        masks[2, 16] = 0  # padding where one token is decoded
        cache, parts = None, []
        with torch.no_grad():
            for first, last in ((0, 8), (8, 16), (16, 17), (17, 25)):
                output = m(
                    ids[:, first:last],
                    attention_mask=masks[:, :last],
                    past_key_values=cache,
                    use_cache=True,
                )
                cache = output.past_key_values
                parts.append(output.logits)
            logits = torch.cat(parts, dim=1)
            for i, mask in enumerate(masks.bool()):
                assert_same(logits[i][mask], m(ids[i][mask][None]).logits[0], what=f"row {i}")

    def test_hidden_states_of_padded_rows_are_those_of_the_rows_alone(self):
        m, ids = model(), tokens(5, 8)
        with torch.no_grad():
            padded = m(ids, attention_mask=self.MASK, output_hidden_states=True).hidden_states
            for i, mask in enumerate(self.MASK.bool()):
                alone = m(ids[i][mask][None], output_hidden_states=True).hidden_states
                for x, y in zip(padded, alone, strict=True):
                    assert_same(x[i][mask], y[0], what=f"row {i}")

    def test_padding_changes_no_gradient(self):
        m, ids = model(), tokens(5, 8)
        real = self.MASK.bool()
        m(ids, attention_mask=self.MASK).logits[real].square().sum().backward()
        padded = {name: p.grad.clone() for name, p in m.named_parameters()}
        m.zero_grad()
        for row, mask in zip(ids, real, strict=True):
            m(row[mask][None]).logits.square().sum().backward()
        for name, p in m.named_parameters():
            assert_same(padded[name], p.grad, what=name, factor=10)


class TestShapes:
    @pytest.mark.parametrize(
        ("width", "millions"),
        [(256, 20.80), (512, 57.32), (768, 104.86), (1024, 171.27), (1536, 341.83)],
    )
    def test_widths_of_the_paper_have_its_parameter_counts(self, width: int, millions: float):
        """arXiv:2606.04048 has 8 layers, 6 heads and 50,304 tied rows;
        it counts the embedding, too.
        """
        with torch.device("meta"):
            m = DeltaForCausalLM(DeltaConfig(hidden_size=width))
        assert round(sum(p.numel() for p in m.parameters()) / 1e6, 2) == millions

    def test_sizes_of_heads_follow_from_the_width(self):
        c = DeltaConfig()
        assert (c.head_dim_k, c.head_dim_v, c.num_v_heads, c.intermediate_size) == (32, 64, 6, 768)
        assert DeltaConfig(hidden_size=512, intermediate_multiple=128).intermediate_size == 1408

    def test_logits_to_keep_selects_positions(self):
        m, ids = model(), tokens(2, 9)
        whole = m(ids).logits
        assert_same(m(ids, logits_to_keep=2).logits, whole[:, -2:])
        assert_same(m(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]])

    def test_hidden_states_and_tuples_are_those_of_the_forward(self):
        m, ids = model(), tokens(2, 9)
        output = m(ids, output_hidden_states=True, use_cache=False)
        assert len(output.hidden_states) == 4
        assert torch.equal(output.hidden_states[0], m.model.embed(ids))
        assert m.config.logit_scale != 1
        hidden = m.model.norm(output.hidden_states[-1])
        assert_same(m.config.logit_scale * m.lm_head(hidden), output.logits)
        assert torch.equal(m(ids, return_dict=False)[0], output.logits)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_an_input_without_tokens_is_refused(shape):
    with pytest.raises(ValueError, match=f"{shape[0]} rows of {shape[1]} tokens"):
        model()(torch.zeros(shape, dtype=torch.long))


class TestBadConfigurations:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"num_heads": 4, "num_v_heads": 6},
                r"num_v_heads=6 is not a multiple of num_heads=4; nearest: 4 or 8",
            ),
            ({"num_heads": 4, "num_v_heads": 3}, r"nearest: 4$"),
            (
                {"head_dim_k": 5, "expand_v": 1.5},
                r"V = 7.5 of K = 5, which must be whole; nearest: 1.4 or 1.6",
            ),
            ({"hidden_size": 4, "num_heads": 6}, r"too narrow for num_heads=6.*at most 3 heads"),
            ({"hidden_size": 256.0}, r"hidden_size=256.0: expected a whole number"),
            ({"num_heads": True}, r"num_heads=True: expected a whole number"),
            ({"vocab_size": 0}, r"vocab_size=0: expected at least 1"),
            ({"conv_size": 0}, r"conv_size=0: expected at least 1"),
            ({"intermediate_size": -1}, r"intermediate_size=-1: expected at least 1"),
            ({"rms_norm_eps": 0.0}, r"rms_norm_eps=0.0: expected more than 0"),
            ({"expand_v": float("nan")}, r"expand_v=nan: expected a finite number"),
            (
                {"attention_layers": [3]},
                r"attention_layers=\[3\] must be different layers of 0 to 2",
            ),
            ({"attention_layers": [1, 1]}, r"must be different layers"),
            (
                {"attention_layers": [0], "head_dim_k": 3, "expand_v": 1},
                r"V=3 must be even in attention_layers",
            ),
            (
                {"parametrization": "mu"},
                r"parametrization=mu: expected 'sp', 'mup_original', 'mup'",
            ),
            ({"readout": "k"}, r"readout=k: expected 'sqrt_k' or 'none'"),
            ({"eos_token_id": 61}, r"eos_token_id=61 has no row: vocab_size=61"),
            ({"eos_token_id": [1, -1]}, r"eos_token_id=-1 has no row"),
            ({"hiden_size": 64}, r"DeltaConfig has no hiden_size=64; did you mean hidden_size"),
            ({"num_value_heads": 8}, r"did you mean num_v_heads"),
        ],
        ids=lambda x: str(x) if isinstance(x, dict) else "",
    )
    def test_a_wrong_setting_is_refused_with_what_was_expected(
        self, changes: dict[str, Any], message: str
    ):
        with pytest.raises(ValueError, match=message):
            config(**changes)

    def test_arguments_of_transformers_are_accepted(self):
        c = DeltaConfig.from_dict(
            {**config().to_dict(), "torch_dtype": "float32", "_name_or_path": "x"}
        )
        assert c.hidden_size == 32


class TestBadCalls:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give either input_ids or inputs_embeds, and not both"),
            (
                {"attention_mask": torch.ones(2, 4)},
                r"attention_mask is \(2, 4\), expected \(2, 5\)",
            ),
            ({"cu_seqlens": torch.tensor([0, 10])}, "packs sequences into one row, not into B=2"),
            ({"past_key_values": ((1, 2),)}, "past_key_values is a tuple; pass a DeltaCache"),
        ],
        ids=["nothing", "mask", "packed rows", "cache"],
    )
    def test_contradictory_arguments_of_forward_are_refused(
        self, arguments: dict[str, Any], message: str
    ):
        ids = tokens(2, 5) if arguments else None
        with pytest.raises(ValueError, match=message):
            model()(ids, **arguments)

    @pytest.mark.parametrize(
        "others", [{"use_cache": True}, {"attention_mask": torch.ones(1, 5)}], ids=str
    )
    def test_packed_sequences_with_a_cache_or_a_mask_are_refused(self, others: dict[str, Any]):
        with pytest.raises(ValueError, match=r"cu_seqlens packs whole sequences: leave out"):
            model()(tokens(1, 5), cu_seqlens=torch.tensor([0, 5]), **others)
        with pytest.raises(ValueError, match=r"cu_seqlens is torch.int32 \(2,\), expected int64"):
            model()(tokens(1, 5), cu_seqlens=torch.tensor([0, 5]).int())

    def test_targets_of_another_shape_are_refused(self):
        with pytest.raises(
            ValueError, match=r"targets \(2, 4\) must have the shape of input_ids \(2, 5\)"
        ):
            model().loss(tokens(2, 5), tokens(2, 4))

    def test_a_cache_with_gradient_checkpointing_is_refused(self):
        m = model().train()
        m.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="runs blocks twice"):
            m(tokens(1, 5), use_cache=True)


@pytest.mark.parametrize(
    "module",
    [
        *("", ".backbone", ".cache", ".config", ".language_model", ".parameters", ".sequence"),
        ".settings",
    ],
)
def test_examples_in_docstrings_run(module: str):
    result = doctest.testmod(import_module(f"delta_trn.models{module}"))
    assert result.attempted > 0 and result.failed == 0
