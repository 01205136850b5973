"""Options of Deep Delta Learning models, each compared with its equation or its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.models.attention import ACTIVATIONS, Shift
from delta_trn.models.initialization import decay_rates
from delta_trn.models.residual import ChannelRead
from tests.models.test_ddl import VARIANTS
from tests.support.tiny_models import assert_same, config, model, rows, tokens

ATTENTION = {"attention_layers": [0, 1, 2], "expand_v": 1.0}
# one attention layer where options of attention count, and an expanded state
MODELS = {
    name: VARIANTS[name]
    for name in ("vector", "token-conv", "channel", "write-only", "shifts", "lm")
}


class TestAttention:
    @staticmethod
    def layer(**changes) -> nn.Module:
        return model(**{**ATTENTION, **changes}).model.blocks[0].mixer

    def test_rope_rotates_the_first_channels_in_pairs_and_leaves_the_rest(self):
        rotated = [
            self.layer(head_dim_k=8, rope_ratio=x).rotated for x in (0.0, 0.3, 0.5, 0.99, 1.0)
        ]
        assert rotated == [0, 2, 4, 6, 8]
        layer = self.layer(head_dim_k=8, rope_ratio=0.5)
        x = torch.randn(1, 4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        cos, sin = layer._angles(torch.arange(5)[None])
        y = layer._rotate(x, cos, sin)
        assert torch.equal(y[..., 4:], x[..., 4:]) and torch.equal(y[:, :, 0], x[:, :, 0])
        # pairs (0, 2) and (1, 3) of four channels, at angles t and t / 10000^(1/2)
        t, z = (
            torch.arange(5.0).double(),
            torch.view_as_complex(torch.stack([x[..., :2], x[..., 2:4]], -1)),
        )
        for pair, speed in ((0, 1.0), (1, 0.01)):
            rotated = z[0, :, :, pair] * torch.exp(1j * t * speed)
            pairs = torch.complex(y[0, :, :, pair], y[0, :, :, pair + 2])
            assert (pairs - rotated).abs().max() < 1e-6  # angles are float32
        assert (y[..., :4] - x[..., :4]).abs().max() > 0.1

    def test_shift_mixes_in_its_share_of_the_token_before(self):
        generator = torch.Generator().manual_seed(0)
        x, u = (torch.randn(1, 5, 6, generator=generator) for _ in range(2))
        shift = Shift(6, 3, "last_key")
        with torch.no_grad():
            shift.proj.weight.normal_(generator=generator)
            y = shift(x, u, rows(5), None)[0]
            a = (u[0] @ shift.proj.weight.T).sigmoid().repeat_interleave(2, dim=1)
        assert torch.allclose(y[0], (1 - a[0]) * x[0, 0])
        for t in range(1, 5):
            assert torch.allclose(y[t], a[t] * x[0, t - 1] + (1 - a[t]) * x[0, t])

    def test_activations_of_q_k_and_v_are_those_named(self):
        x = torch.linspace(-3, 3, 7)
        expected = {"identity": x, "silu": x * x.sigmoid(), "relu": x.clamp(min=0)}
        expected["elu+1"] = torch.where(x > 0, x + 1, x.exp())
        assert all(torch.allclose(ACTIVATIONS[name](x), y) for name, y in expected.items())
        assert set(ACTIVATIONS) == set(expected)

    @pytest.mark.parametrize("gate", [False, True])
    def test_attention_heads_are_normalized_and_gated(self, gate: bool):
        layer = self.layer(using_groupnorm=not gate, use_output_gate=gate)
        heads: list[Tensor] = []
        layer.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
        x = torch.randn(1, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            layer(x, rows(7, attention=True))
            y = heads[0].unflatten(-1, (-1, layer.D))
            if gate:
                y = y / F.silu(layer.g_proj(x)).unflatten(-1, (-1, layer.D))
        assert (y.square().mean(-1) - 1).abs().max() < 1e-3


def test_a_causal_channel_convolution_sees_no_later_value():
    """Pads the values by all taps on the left if causal, and evenly otherwise."""
    sizes = {"residual": "ddl", "ddl_value_channels": 4, "ddl_compressor": "channel"}
    for causal, left in ((True, 3), (False, 1)):
        read = ChannelRead(config(**sizes, ddl_state_dv_shortconv_causal=causal))
        assert read.left == left
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            w, r = read.weight.normal_(generator=generator), read.read.normal_(generator=generator)
            x = torch.randn(1, 1, 32, 4, generator=generator)
            padded = F.pad(x[0, 0], (left, 3 - left))
            convolved = F.conv1d(padded[None], w[:, None], groups=32)[0]
            assert torch.allclose(read(x.flatten(-2), None, None)[0, 0], convolved @ r, atol=1e-5)


def test_depth_scaled_init_shrinks_output_projections():
    plain, scaled = (dict(model(depth_scaled_init=x).named_parameters()) for x in (False, True))
    for name, p in plain.items():
        smaller = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert torch.allclose(scaled[name], p * 3**-0.5 if smaller else p, rtol=1e-6), name


@pytest.mark.parametrize("size", [0.0, 0.1])
def test_mixer_output_init_scales_output_projections_which_still_learn_from_zero(size):
    plain, quiet = (model(mixer_output_init=x) for x in (1.0, size))
    for (name, p), (_, x) in zip(plain.named_parameters(), quiet.named_parameters(), strict=True):
        assert torch.allclose(x, p * size if name.endswith("o_proj.weight") else p, rtol=1e-6), name
    ids = tokens(2, 9)
    quiet.loss(ids[:, :-1], ids[:, 1:]).backward()
    outputs = [block.mixer.o_proj.weight.grad for block in quiet.model.blocks]
    assert all(gradient.abs().max() > 0 for gradient in outputs), "a matrix of 0 still learns"


def test_label_smoothing_is_pytorchs_and_only_in_training():
    m, ids = model(label_smoothing=0.1), tokens(2, 9)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 2:5] = -100
    z = m(inputs, use_cache=False).logits.flatten(0, 1)
    for training, smoothing in ((True, 0.1), (False, 0.0)):
        m.train(training)
        loss = m.loss(inputs, targets)
        expected = F.cross_entropy(z, targets.flatten(), label_smoothing=smoothing)
        assert_same(loss, expected, what="loss")
        gradient, expected_gradient = (
            torch.autograd.grad(y, m.model.embed.weight, retain_graph=True)[0]
            for y in (loss, expected)
        )
        assert_same(gradient, expected_gradient, what="gradient", factor=4)
    assert (
        abs(
            F.cross_entropy(z, targets.flatten())
            - F.cross_entropy(z, targets.flatten(), label_smoothing=0.1)
        )
        > 1e-3
    )


def test_forgetting_multiplies_every_decay_rate():
    draws = [
        decay_rates(torch.empty(1000), torch.Generator().manual_seed(0), factor=factor).exp()
        for factor in (1.0, 1 / 16)
    ]
    assert (
        torch.allclose(draws[0], (16 * draws[1]).clamp(min=1e-4), atol=2e-3) and draws[0].max() > 15
    )


@pytest.mark.parametrize("name", ["token-conv", "lm"])  # which have every module between them
def test_deep_delta_compiles_into_one_graph_with_the_same_gradients(name: str):
    """With torch.compile(fullgraph=True) any break of the graph is an error."""
    attention = [0] if MODELS[name].get("attention_layers") else []
    sizes = {**MODELS[name], "num_hidden_layers": 1, "attention_layers": attention}
    m, ids = model(dtype=torch.float32, **sizes).train(), tokens(2, 10)

    def gradients(loss) -> list[Tensor]:
        m.zero_grad()
        loss(ids[:, :-1], ids[:, 1:]).backward()
        return [p.grad.double() for p in m.parameters()]

    torch._dynamo.reset()
    plain = gradients(m.loss)
    compiled = gradients(torch.compile(m.loss, fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()
    for p, (found, expected) in zip(
        m.named_parameters(), zip(compiled, plain, strict=True), strict=True
    ):
        assert_same(found.float(), expected.float(), what=p[0], factor=16)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_keeps_stream_and_gates_in_float32(name: str):
    """Products have a relative error of 2^-9; a bfloat16 stream would add as much in every sum.

    The logits of gates are float32 maps of float32 inputs.
    """
    m, ids = model(dtype=torch.float32, **MODELS[name]).train(), tokens(4, 16)
    plain = m.loss(ids[:, :-1], ids[:, 1:])
    gates: list[Tensor] = []
    for module in m.modules():
        if type(module).__name__ == "Gate":
            module.register_forward_hook(lambda _, x, beta: gates.append(beta))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streams = m(ids, output_hidden_states=True).hidden_states
        mixed = m.loss(ids[:, :-1], ids[:, 1:])
    assert all(x.dtype == torch.float32 for x in (*streams, *gates)) and len(gates) == 12
    assert mixed.dtype == torch.float32 and mixed != plain
    assert abs(mixed - plain) < 0.05 * plain
    mixed.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


@pytest.mark.parametrize("constant", [False, True])
def test_writes_move_the_stream_as_much_at_every_width(constant):
    """v grows like sqrt(m) under muP; without it, as under SP,
    8 times the width moves the stream less.
    """
    changes: dict[str, list[float]] = {"mup": [], "sp": []}
    for parametrization, sizes in changes.items():
        for width in (64, 512):
            options = {"hidden_size": width, "base_width": 64, "initializer_range": 0.02}
            m = model(
                dtype=torch.float32,
                parametrization=parametrization,
                residual="ddl",
                **ATTENTION,
                **options,
                ddl_v_constant=constant,
            )
            with torch.no_grad():
                m.model.embed.weight.normal_(0, 1)
                states = m(tokens(4, 16), output_hidden_states=True).hidden_states
            sizes.append(float((states[-1] - states[0]).square().mean().sqrt()))
    mup, sp = changes["mup"], changes["sp"]
    assert mup[0] == sp[0], "at the base width they are one model"
    assert 0.8 < mup[1] / mup[0] < 1.25
    assert sp[1] / sp[0] < 0.6
