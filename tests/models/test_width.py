"""Measures what width changes and what it must not: initial scales, output norm, training, steps."""

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
    """Takes `steps` steps on the same tokens with the factors that the table gives every parameter."""
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
    """The std of n numbers has a relative error of about 1 / sqrt(2 n); five times that is allowed."""
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
    """Compares it with mean(o^2), for inputs of mean square 1. In the released code it outweighs that."""
    m = model(width, base_width=256, num_heads=6, num_hidden_layers=1)
    layer, squares = m.model.blocks[0].mixer, []
    layer.o_norm.register_forward_pre_hook(lambda _, args: squares.append(args[0].square().mean()))
    with torch.no_grad():
        layer(torch.randn(4, 64, width, generator=torch.Generator().manual_seed(1)), sequence_rows(64))
    assert float(squares[0]) > 1e3 * m.config.rms_norm_eps


class TestTraining:
    @staticmethod
    def train_weights(width: int, parametrization: str, optimizer: str) -> dict[str, Tensor]:
        m = model(width, parametrization=parametrization, attention_layers=[1])
        train(m, optimizer, 2, 0.01, tokens(2, 17))
        return m.state_dict()

    @pytest.mark.parametrize("parametrization", [name for name in TABLES if name != "sp"])
    @optimizers
    def test_training_at_base_width_is_standard_to_the_last_bit(self, parametrization: str, optimizer: str):
        weights, standard = (self.train_weights(BASE, name, optimizer) for name in (parametrization, "sp"))
        assert all(torch.equal(p, standard[name]) for name, p in weights.items())

    @optimizers
    def test_training_at_another_width_is_not_standard(self, optimizer: str):
        weights, standard = (self.train_weights(2 * BASE, name, optimizer) for name in ("mup", "sp"))
        assert not any(torch.equal(p, standard[name]) for name, p in weights.items() if p.dim() == 2)


class TestSizesOfChanges:
    """Steps change what a muP model computes equally at every width; under SP wide models change more."""

    WIDTHS = (64, 128, 256, 512)
    RATES = (("adamw", 1e-3), ("sgd", 0.1))

    @staticmethod
    def gate_inputs(m: DeltaForCausalLM, ids: Tensor) -> Tensor:
        captured: list[Tensor] = []
        handle = m.model.blocks[-1].mixer.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
        m(ids)
        handle.remove()
        return captured[0].detach()

    @staticmethod
    @torch.no_grad()
    def observed(m: DeltaForCausalLM, ids: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Returns activations of the same tokens, and gates of the same x, which isolates their weights."""
        layer = m.model.blocks[-1].mixer
        output = m(ids, output_hidden_states=True, use_cache=False)
        gates = [x @ projection.weight.T for projection in (layer.a_proj, layer.b_proj)]
        return {"logits": output.logits, "hidden": output.hidden_states[-1], "gates": torch.cat(gates)}

    @classmethod
    def slopes(cls, parametrization: str, optimizer: str, lr: float) -> dict[str, float]:
        """Returns slopes of log rms of the change against log width."""
        ids, sizes = tokens(2, 33), defaultdict(list)
        for width in cls.WIDTHS:
            m = model(width, parametrization=parametrization, num_hidden_layers=1)
            x = cls.gate_inputs(m, ids)
            before = cls.observed(m, ids, x)
            train(m, optimizer, 3, lr, ids)
            for name, after in cls.observed(m, ids, x).items():
                sizes[name].append((after - before[name]).square().mean().sqrt().log2())
        place = torch.tensor(cls.WIDTHS).log2()
        place = (place - place.mean()) / (place - place.mean()).square().sum()
        return {name: float(place @ torch.stack(y)) for name, y in sizes.items()}

    @pytest.mark.parametrize(("optimizer", "lr"), RATES)
    def test_changes_of_activations_are_flat_under_mup(self, optimizer: str, lr: float):
        """Measured: at most 0.25, one seed, m = 1 to 8. A wrong rule is off by a multiple of 0.5."""
        for name, slope in self.slopes("mup", optimizer, lr).items():
            assert abs(slope) < 0.35, f"{name} changes as width^{slope:.2f}"

    @pytest.mark.parametrize(("optimizer", "lr"), RATES)
    def test_changes_of_activations_grow_under_the_standard_parametrization(self, optimizer: str, lr: float):
        """Without muP the slopes are far above the limit of the check above."""
        for name, slope in self.slopes("sp", optimizer, lr).items():
            assert slope > 0.5, f"{name} changes as width^{slope:.2f}"

    def test_changes_of_gates_under_sgd_are_flat_only_with_the_papers_rule(self):
        """Hidden matrices' rate is sqrt(m) too large for gates."""
        assert abs(self.slopes("mup_original", "sgd", 0.1)["gates"] - 0.5) < 0.2
