"""Measures what width changes and what it must not: initial scales,
output norm, training, steps.
"""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_trn.models import DeltaConfig, DeltaForCausalLM
from delta_trn.models.mup import OPTIMIZERS, TABLES
from delta_trn.models.parameters import ScaledParameter, scaled_parameters
from tests.support.tiny_models import VOCABULARY, tokens
from tests.support.tiny_models import rows as sequence_rows

BASE = 64
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def model(width: int, seed: int = 0, **changes: Any) -> DeltaForCausalLM:
    """Returns a model of two heads that grow with width: K = 24, 48, 96 at m = 1, 2, 4."""
    torch.manual_seed(seed)
    sizes = {"base_width": BASE, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_heads": 2}
    return DeltaForCausalLM(
        DeltaConfig(hidden_size=width, **{**sizes, "intermediate_multiple": 16, **changes})
    )


def rows(m: DeltaForCausalLM, optimizer: str = "adamw", lr: float = 1.0) -> list[ScaledParameter]:
    return scaled_parameters(m, optimizer=optimizer, lr=lr, weight_decay=0.1)


def train(m: DeltaForCausalLM, optimizer: str, steps: int, lr: float, ids: Tensor) -> None:
    """Takes `steps` steps on the same tokens with the factors
    that the table gives every parameter.
    """
    groups: list[dict[str, Any]] = []
    for row in rows(m, optimizer, lr):
        group = {"params": [row.parameter], "lr": row.lr, "weight_decay": row.weight_decay}
        groups.append(group if optimizer == "sgd" else {**group, "eps": 1e-8 * row.epsilon})
    stepper = (torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD)(groups, lr=lr)
    for _ in range(steps):
        stepper.zero_grad()
        m.loss(ids[:, :-1], ids[:, 1:]).backward()
        stepper.step()


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("parametrization", TABLES)
def test_initial_weights_have_the_std_of_their_role(parametrization: str, m: int):
    """The std of n numbers has a relative error of about 1 / sqrt(2 n);
    five times that is allowed.
    """
    hidden = 0.02 if parametrization == "sp" else 0.02 / math.sqrt(m)
    numbers: dict[str, list[Tensor]] = defaultdict(list)
    for row in rows(model(m * BASE, parametrization=parametrization)):
        if row.init_std is not None:
            numbers[row.role.name].append(row.parameter.detach().flatten())
    assert set(numbers) == {"EMBEDDING", "HIDDEN", "GATE"}
    for group, values in numbers.items():
        x, std = torch.cat(values), 0.02 if group == "EMBEDDING" else hidden
        assert x.std() == pytest.approx(std, rel=5 / math.sqrt(2 * len(x))), group
        assert x.mean().abs() < 5 * x.std() / math.sqrt(len(x)), group


def test_nothing_is_drawn_for_parameters_without_memory(monkeypatch: pytest.MonkeyPatch):
    """A model of billions of parameters can be counted without a minute of random numbers."""

    def draw(*_: Any, **__: Any) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(Tensor, "normal_", draw)
    with torch.device("meta"):
        model(BASE)
    with pytest.raises(AssertionError, match="drawn"):
        model(BASE)


@pytest.mark.parametrize("width", [256, 1024])
def test_the_epsilon_of_the_output_norm_is_negligible_at_every_width(width: int):
    """Compares it with mean(o^2), for inputs of mean square 1.
    In the released code it outweighs that.
    """
    m = model(width, base_width=256, num_heads=6, num_hidden_layers=1)
    layer, squares = m.model.blocks[0].mixer, []
    layer.o_norm.register_forward_pre_hook(lambda _, args: squares.append(args[0].square().mean()))
    with torch.no_grad():
        layer(
            torch.randn(4, 64, width, generator=torch.Generator().manual_seed(1)), sequence_rows(64)
        )
    assert float(squares[0]) > 1e3 * m.config.rms_norm_eps


@pytest.mark.parametrize("parametrization", [name for name in TABLES if name != "sp"])
@optimizers
def test_training_at_base_width_alone_is_standard_to_the_last_bit(
    parametrization: str, optimizer: str
):
    for m in (1, 2):
        weights = []
        for name in (parametrization, "sp"):
            trained = model(m * BASE, parametrization=name, attention_layers=[1])
            train(trained, optimizer, 2, 0.01, tokens(2, 17))
            weights.append([p for p in trained.parameters() if p.dim() == 2])
        assert all(torch.equal(p, q) == (m == 1) for p, q in zip(*weights, strict=True))
