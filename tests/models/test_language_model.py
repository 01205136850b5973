"""The model as a function: identities in float64, other implementations, sizes and bad input."""

import doctest
import math
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from delta_trn.backends import gated_delta_rule
from delta_trn.backends.parity.judge import error
from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.initialization import taps
from delta_trn.models.language_model import linear_cross_entropy
from delta_trn.models.layers import RMSNorm
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import Sequences
from tests.support.tiny_models import VARIANTS, VOCABULARY, assert_same, config, model, packed, rows, tokens

variants = pytest.mark.parametrize("variant", VARIANTS)


class TestLayer:
    @staticmethod
    def by_its_equations(layer: GatedDeltaNet, x: Tensor) -> Tensor:
        """Returns y [1, T, d] of x [1, T, d] by the docstring's equations; the judge computes the rule."""
        T, W = x.shape[1], layer.conv.weight.shape[1]
        qkv = torch.cat([x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1).mT
        taps = layer.conv.weight[:, None]
        qkv = F.silu(F.conv1d(qkv, taps, padding=W - 1, groups=len(taps))[..., :T]).mT
        sizes = (layer.K, layer.K, layer.V)
        parts = zip(qkv.split(layer.sizes, dim=-1), sizes, strict=True)
        q, k, v = (y.unflatten(-1, (-1, size)) for y, size in parts)
        g = -layer.A_log.exp() * F.softplus(x @ layer.a_proj.weight.T + layer.dt_bias)
        beta = layer.beta_max * (x @ layer.b_proj.weight.T).sigmoid()
        o, _ = gated_delta_rule(
            q, k, v, g, beta, scale=math.sqrt(layer.K), use_qk_l2norm_in_kernel=True, backend="recurrent"
        )
        gate = F.silu(x @ layer.g_proj.weight.T).unflatten(-1, (-1, layer.V))
        normalized = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-6) * layer.o_norm.weight
        return (normalized * gate).flatten(-2) @ layer.o_proj.weight.T

    @pytest.mark.parametrize("variant", ["gdn", "grouped", "untied"])
    @pytest.mark.parametrize("T", [1, 2, 3, 17])
    def test_forward_computes_the_equations_of_its_docstring(self, variant: str, T: int):
        layer = model(**VARIANTS[variant]).model.blocks[0].mixer
        x = torch.randn(1, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
        with torch.no_grad():
            assert_same(layer(x, rows(T)), self.by_its_equations(layer, x))

    def test_weights_of_qwen3_next_compute_what_transformers_computes(self):
        """Compares with transformers' layer, whose packed projections are unpacked into ours."""
        c = config(num_v_heads=8, readout="none")
        d, H, HV, K, V = c.hidden_size, c.num_heads, c.num_v_heads, c.head_dim_k, c.head_dim_v
        theirs = Qwen3NextGatedDeltaNet(
            Qwen3NextConfig(
                hidden_size=d,
                linear_num_key_heads=H,
                linear_num_value_heads=HV,
                linear_key_head_dim=K,
                linear_value_head_dim=V,
                linear_conv_kernel_dim=4,
                rms_norm_eps=c.rms_norm_eps,
                num_hidden_layers=1,
            ),
            layer_idx=0,
        ).double()
        generator = torch.Generator().manual_seed(0)
        for p in theirs.parameters():
            p.data.normal_(0, 0.5, generator=generator)
        ours = GatedDeltaNet(c).double()
        each = HV // H  # value heads of a key head, which in_proj_qkvz keeps together
        qkvz = theirs.in_proj_qkvz.weight.unflatten(0, (H, -1)).split([K, K, each * V, each * V], dim=1)
        beta, a = theirs.in_proj_ba.weight.unflatten(0, (H, -1)).split([each, each], dim=1)
        ours.load_state_dict(
            {
                "q_proj.weight": qkvz[0].flatten(0, 1),
                "k_proj.weight": qkvz[1].flatten(0, 1),
                "v_proj.weight": qkvz[2].flatten(0, 1),
                "g_proj.weight": qkvz[3].flatten(0, 1),
                "a_proj.weight": a.flatten(0, 1),
                "b_proj.weight": beta.flatten(0, 1),
                "o_proj.weight": theirs.out_proj.weight,
                "conv.weight": theirs.conv1d.weight[:, 0],
                "A_log": theirs.A_log,
                "dt_bias": theirs.dt_bias,
                "o_norm.weight": theirs.norm.weight,
            }
        )
        x = torch.randn(2, 70, d, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            y, expected = ours(x, rows(70)), theirs(x)
        # transformers computes its delta rule in float32 for every dtype
        assert error(y, expected) < 300 * torch.finfo(torch.float32).eps

    def test_short_convolution_computes_conv1d_and_silu(self):
        conv = ShortConvolution(5, 4, Tag(Role.VECTOR, law=taps)).double()
        torch.nn.init.normal_(conv.weight)
        x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
        expected = F.silu(F.conv1d(x.mT, conv.weight[:, None], padding=3, groups=5)[..., :9]).mT
        assert_same(conv(x, rows(9)), expected)

    def test_handwritten_derivatives_pass_gradcheck(self):
        conv = ShortConvolution(3, 4, Tag(Role.VECTOR, law=taps)).double()
        norm = RMSNorm(3, 1e-6).double()
        torch.nn.init.normal_(conv.weight)
        torch.nn.init.normal_(norm.weight)
        x = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
        packed = Sequences.packed(torch.tensor([0, 2, 2, 6]), 6, attention=False)
        for sequences in (rows(6), packed):
            check = torch.autograd.gradcheck
            assert check(lambda x, w, s=sequences: call_with(conv, w, x, s), (x, conv.weight))
        assert torch.autograd.gradcheck(lambda x, w: call_with(norm, w, x), (x, norm.weight))
        targets = torch.tensor([0, 3, -100, 1, 4, 2])
        weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda h, w: linear_cross_entropy(h, w, targets, 0.7), (x[0].detach().requires_grad_(), weight)
        )

    def test_reversed_taps_fail_the_comparison_with_the_equations(self):
        layer = model().model.blocks[0].mixer
        x = torch.randn(1, 17, 32, dtype=torch.float64)
        expected = self.by_its_equations(layer, x)
        layer.conv.weight.data = layer.conv.weight.data.flip(1)
        with torch.no_grad(), pytest.raises(AssertionError, match="above"):
            assert_same(layer(x, rows(17)), expected)


def call_with(module: torch.nn.Module, weight: Tensor, *inputs: Any) -> Any:
    """Calls a module with another weight in place of its own."""
    return torch.func.functional_call(module, {"weight": weight}, inputs)


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

    @variants
    @pytest.mark.parametrize("lengths", [[1, 2, 3, 0, 4], [65, 1, 0, 0, 7], [30]], ids=str)
    def test_packed_sequences_have_the_logits_of_separate_ones(self, variant: str, lengths: list[int]):
        m = model(**VARIANTS[variant])
        cu_seqlens, places = packed(lengths)
        ids = tokens(1, sum(lengths))
        with torch.no_grad():
            together = m(ids, cu_seqlens=cu_seqlens).logits
            for place in places:
                if place.start < place.stop:
                    assert_same(together[:, place], m(ids[:, place]).logits, what=str(place))

    def test_packed_tokens_without_boundaries_influence_each_other(self):
        """Without cu_seqlens, other sequences change logits by far more than the tolerance."""
        m, ids = model(), tokens(1, 12)
        with torch.no_grad():
            assert error(m(ids).logits[:, 6:], m(ids[:, 6:]).logits) > 1e-3

    @variants
    def test_gradients_of_packed_sequences_are_those_of_separate_ones(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(1, 41)
        cu_seqlens, places = packed([5, 0, 35])
        inputs, targets = ids[:, :-1], ids[:, 1:]
        m.loss(inputs, targets, cu_seqlens=cu_seqlens).backward()
        together = {name: p.grad.clone() for name, p in m.named_parameters()}
        m.zero_grad()
        for place in (places[0], places[2]):
            share = (place.stop - place.start) / 40
            (share * m.loss(inputs[:, place], targets[:, place])).backward()
        for name, p in m.named_parameters():
            assert_same(together[name], p.grad, what=name, factor=10)

    @variants
    @pytest.mark.parametrize("cuts", [[1], [2, 3], [64, 65], [3, 40, 41, 69]], ids=str)
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

    @variants
    def test_ids_at_padded_places_change_no_logit_of_real_tokens(self, variant: str):
        m, ids = model(**VARIANTS[variant]), tokens(5, 8)
        other = torch.where(self.MASK.bool(), ids, (ids + 7) % VOCABULARY)
        with torch.no_grad():
            logits = [m(x, attention_mask=self.MASK).logits[self.MASK.bool()] for x in (ids, other)]
        assert torch.equal(*logits)

    @variants
    def test_padding_may_lie_in_any_part_of_a_forward_in_parts(self, variant: str):
        """In a conversation with turns of different lengths, whole rows of a part may be padding."""
        m = model(**VARIANTS[variant])
        ids = tokens(5, 25)
        masks = torch.cat([self.MASK, self.MASK.flip(0), torch.ones(5, 1).int(), self.MASK], 1)
        masks[1, 8:16] = 0
        masks[2, 16] = 0  # padding where one token is decoded
        cache, parts = None, []
        with torch.no_grad():
            for first, last in ((0, 8), (8, 16), (16, 17), (17, 25)):
                output = m(
                    ids[:, first:last], attention_mask=masks[:, :last], past_key_values=cache, use_cache=True
                )
                cache = output.past_key_values
                parts.append(output.logits)
            logits = torch.cat(parts, dim=1)
            for i, mask in enumerate(masks.bool()):
                assert_same(logits[i][mask], m(ids[i][mask][None]).logits[0], what=f"row {i}")

    def test_padding_without_a_mask_changes_logits(self):
        m, ids = model(), tokens(5, 8)
        with torch.no_grad():
            assert error(m(ids).logits[1, 3:], m(ids[1:2, 3:]).logits[0]) > 1e-3

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
        """arXiv:2606.04048 has 8 layers, 6 heads and 50,304 tied rows; it counts the embedding, too."""
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
        assert_same(m.lm_head(m.model.norm(output.hidden_states[-1])), output.logits)
        assert torch.equal(m(ids, return_dict=False)[0], output.logits)

    def test_embeddings_may_replace_ids(self):
        m, ids = model(), tokens(2, 9)
        assert torch.equal(m(inputs_embeds=m.model.embed(ids)).logits, m(ids).logits)


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
            ({"attention_layers": [3]}, r"attention_layers=\[3\] must be different layers of 0 to 2"),
            ({"attention_layers": [1, 1]}, r"must be different layers"),
            (
                {"attention_layers": [0], "head_dim_k": 3, "expand_v": 1},
                r"V=3 must be even in attention_layers",
            ),
            ({"parametrization": "mu"}, r"parametrization=mu: expected 'sp', 'mup_original', 'mup'"),
            ({"readout": "k"}, r"readout=k: expected 'sqrt_k' or 'none'"),
            ({"value_skip": 1.0}, r"value_skip=1.0 is a setting of an earlier version"),
            ({"init": "authors"}, r"init='authors' is a setting of an earlier version"),
            ({"scale_by": "depth"}, r"scale_by=depth: expected 'head_dim' or 'heads'"),
            ({"eos_token_id": 61}, r"eos_token_id=61 has no row: vocab_size=61"),
            ({"eos_token_id": [1, -1]}, r"eos_token_id=-1 has no row"),
            ({"hiden_size": 64}, r"DeltaConfig has no hiden_size=64; did you mean hidden_size"),
            ({"num_value_heads": 8}, r"did you mean num_v_heads"),
        ],
        ids=lambda x: str(x) if isinstance(x, dict) else "",
    )
    def test_a_wrong_setting_is_refused_with_what_was_expected(self, changes: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            config(**changes)

    def test_arguments_of_transformers_are_accepted(self):
        c = DeltaConfig.from_dict({**config().to_dict(), "torch_dtype": "float32", "_name_or_path": "x"})
        assert c.hidden_size == 32

    def test_settings_of_an_earlier_version_that_asked_for_nothing_are_dropped(self):
        old = DeltaConfig.from_dict({**config().to_dict(), "init": "delta_trn", "output_norm_eps": None})
        assert old.to_dict() == config().to_dict()


class TestBadCalls:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give either input_ids or inputs_embeds, and not both"),
            ({"attention_mask": torch.ones(2, 4)}, r"attention_mask is \(2, 4\), expected \(2, 5\)"),
            ({"cu_seqlens": torch.tensor([0, 5]), "use_cache": True}, "cu_seqlens packs whole sequences"),
            ({"cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.ones(2, 5)}, "leave out"),
            ({"past_key_values": ((1, 2),)}, "past_key_values is a tuple; pass a DeltaCache"),
        ],
        ids=["nothing", "mask", "packed cache", "packed mask", "cache"],
    )
    def test_contradictory_arguments_of_forward_are_refused(self, arguments: dict[str, Any], message: str):
        ids = tokens(2, 5) if arguments else None
        with pytest.raises(ValueError, match=message):
            model()(ids, **arguments)

    def test_targets_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match=r"targets \(2, 4\) must have the shape of input_ids \(2, 5\)"):
            model().loss(tokens(2, 5), tokens(2, 4))

    def test_a_cache_with_gradient_checkpointing_is_refused(self):
        m = model().train()
        m.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="runs blocks twice"):
            m(tokens(1, 5), use_cache=True)


@pytest.mark.parametrize(
    "module",
    ["", ".backbone", ".cache", ".config", ".language_model", ".mup", ".parameters", ".settings"],
)
def test_examples_in_docstrings_run(module: str):
    result = doctest.testmod(import_module(f"delta_trn.models{module}"))
    assert result.attempted > 0 and result.failed == 0
