"""Softmax attention layers among Gated DeltaNet ones: the formula,
rotary positions, muP's scale.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from delta_trn.backends.parity.judge import error
from delta_trn.models.attention import Attention
from tests.support.tiny_models import model, rows

# Angles are in float32 whatever the weights: at position p their error is up to p times its
# epsilon.
ANGLE = torch.finfo(torch.float32).eps


def attention(dtype: torch.dtype = torch.float64, **changes: object) -> Attention:
    return model(dtype=dtype, attention_layers=[1], **changes).model.blocks[1].mixer


def inputs(T: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, T, 32, dtype=dtype, generator=torch.Generator().manual_seed(T))


def by_the_formula(layer: Attention, x: Tensor) -> Tensor:
    """Returns y [T, d], with pairs as complex numbers that only the distance
    of query and key rotates.
    """
    T, D = x.shape[0], layer.D
    q, k, v = (
        (x @ p.weight.T).unflatten(1, (-1, D)).unbind(1)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    wavelengths = layer.theta ** -(torch.arange(D // 2, dtype=x.dtype) * 2 / D)
    heads = []
    for q_h, k_h, v_h in zip(q, k, v, strict=True):
        q_c, k_c = (torch.complex(*a.chunk(2, dim=1)) for a in (q_h, k_h))
        out = []
        for t in range(T):
            distance = torch.arange(t, -1, -1, dtype=x.dtype)
            rotated = k_c[: t + 1] * torch.exp(-1j * distance[:, None] * wavelengths)
            logits = layer.scale * (q_c[t] * rotated.conj()).real.sum(1)
            out.append(torch.softmax(logits, dim=0) @ v_h[: t + 1])
        heads.append(torch.stack(out))
    return torch.cat(heads, dim=1) @ layer.o_proj.weight.T


@pytest.mark.parametrize("T", [1, 2, 17])
def test_attention_computes_its_formula(T: int):
    layer, x = attention(), inputs(T)
    with torch.no_grad():
        y, expected = (
            layer(x, rows(T, attention=True)),
            torch.stack([by_the_formula(layer, row) for row in x]),
        )
    assert error(y, expected) < 10 * T * ANGLE


def test_positions_off_by_one_change_attention():
    """Shifting keys by one place changes the output by far more than the tolerance."""
    layer, x, sequences = attention(), inputs(17), rows(17, attention=True)
    position = sequences.position.clone()
    position[:, 8:] += 1
    with torch.no_grad():
        y, expected = layer(x, replace(sequences, position=position)), layer(x, sequences)
    assert error(y, expected) > 1000 * 170 * ANGLE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 1 / D at m = 1 times a constant, D = 12 at m = 2
        ({"parametrization": "mup"}, 12**-0.5 * 2**-0.5),
        ({"parametrization": "mup_original"}, 12**-0.5 * 2**-0.5),
        ({"parametrization": "sp"}, 12**-0.5),
        ({"parametrization": "mup", "base_width": 32}, 12**-0.5),
    ],
    ids=str,
)
def test_logits_scale_as_one_over_the_size_of_growing_heads(changes: dict, expected: float):
    assert attention(**changes).scale == pytest.approx(expected)


def test_attention_has_as_many_weights_as_the_projections_it_replaces():
    def weights(layer: torch.nn.Module, *names: str) -> int:
        return sum(layer.get_parameter(f"{name}_proj.weight").numel() for name in names)

    delta, softmax, last = (block.mixer for block in model(attention_layers=[1]).model.blocks)
    assert type(delta) is type(last) is not type(softmax)
    assert weights(softmax, *"qkvo") == sum(p.numel() for p in softmax.parameters())
    assert weights(softmax, *"qkvo") == weights(delta, *"qkvgo")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_is_computed_in_float32_and_returned_in_the_inputs_dtype(dtype: torch.dtype):
    layer = attention(dtype)
    assert layer(inputs(5, dtype), rows(5, attention=True)).dtype == dtype
    assert all(x.dtype == torch.float32 for x in layer._angles(rows(5).position))
