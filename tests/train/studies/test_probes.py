"""Probes compute the documented formulas, leave training unchanged, and can be plotted."""

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from delta_trn.backends import gated_delta_rule
from delta_trn.models.parameters import scaled_parameters
from delta_trn.models.sequence import Sequences
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data import Batch
from delta_trn.train.studies.fits import Line, line
from delta_trn.train.studies.probe_plots import PANELS, PLACES, load_probes
from delta_trn.train.studies.probes import GROUPS, Probes, group_of, normalized, observed, recall, rms
from tests.support.tiny_models import model, tokens
from tests.support.tiny_run import final_state, keys, read_metrics, run_command, train


def make_probes(m, batch: Batch, lr: float = 0.1) -> tuple[Probes, torch.optim.Optimizer]:
    rows = scaled_parameters(m, optimizer="sgd", lr=lr, weight_decay=0.0)
    groups = [{"params": [r.parameter], "names": [r.name], "lr": r.lr} for r in rows]
    optimizer = torch.optim.SGD(groups, lr=lr)
    return Probes(m, optimizer, m.loss, batch, torch.device("cpu")), optimizer


def watch_outputs(mixer: nn.Module) -> list[Tensor]:
    """Returns a list to which every pass appends the delta rule's output, which keeps its gradient."""
    seen: list[Tensor] = []

    def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        seen.append(inputs[0])

    mixer.o_norm.register_forward_pre_hook(see)
    return seen


class TestFormulas:
    BATCH = Batch(tokens(2, 17)[:, :-1], tokens(2, 17)[:, 1:])

    def test_recall_is_one_for_keys_that_point_anywhere(self):
        """E (S^T k)^2 = |S|^2 / K for k uniform on the sphere; 4000 keys leave a percent or two."""
        generator = torch.Generator().manual_seed(0)
        S = torch.randn(1, 1, 8, 16, generator=generator).expand(4000, 1, 8, 16)
        k = torch.randn(4000, 1, 8, generator=generator)
        assert recall(S, k) == pytest.approx(1, abs=0.03)

    def test_recall_is_sqrt_K_for_the_only_written_key_and_zero_for_others(self):
        k = normalized(torch.tensor([[[3.0, 4.0, 0, 0]]]))
        S = torch.einsum("bhk,v->bhkv", k, torch.arange(1.0, 6.0))
        assert recall(S, 7 * k) == pytest.approx(2, rel=1e-5)
        assert recall(S, torch.tensor([[[4.0, -3.0, 0, 0]]])) == pytest.approx(0, abs=1e-6)

    def test_gradient_probes_are_of_the_loss_summed_over_tokens(self):
        """Repeating the sequences keeps the gradients of each and doubles those of weights."""
        m = model()
        once, _ = make_probes(m, self.BATCH)
        twice, _ = make_probes(m, self.BATCH.each(lambda x: x.repeat(2, 1)))
        a, b = once.measure(), twice.measure()
        for name in ("q", "k", "v", "o", "y", "hidden"):
            key = f"layers/1/grad_{name}"
            assert b[key] == pytest.approx(a[key], rel=1e-4) and a[key] > 0
        assert b["groups/mlp/grad"] == pytest.approx(2 * a["groups/mlp/grad"], rel=1e-4)

    def test_the_output_o_is_orthogonal_to_its_gradient(self):
        """The norm that follows ignores the length of o, so o's gradient has no part along o."""
        m = model(rms_norm_eps=1e-30)
        seen = watch_outputs(m.model.blocks[1].mixer)
        m.loss(*self.BATCH).backward()
        (o,) = seen
        assert o.grad is not None
        along = (o * o.grad).sum(-1).abs() / (o.norm(dim=-1) * o.grad.norm(dim=-1)).clamp_min(1e-300)
        assert along.max() < 1e-9

    def test_update_probes_measure_what_the_step_changed(self):
        m = model()
        probes, optimizer = make_probes(m, self.BATCH)
        m.loss(*self.BATCH).backward()
        probes.before_step()
        before = {name: p.detach().clone() for name, p in m.named_parameters()}
        optimizer.step()
        values = probes.measure()
        changed, weight = defaultdict(float), defaultdict(float)
        for name, p in m.named_parameters():
            changed[group_of(name)] += float((p - before[name]).square().sum())
            weight[group_of(name)] += float(p.square().sum())
        for group, square in changed.items():
            assert values[f"groups/{group}/update"] == pytest.approx(math.sqrt(square), rel=1e-5)
            share = math.sqrt(square / weight[group])
            assert values[f"groups/{group}/fraction"] == pytest.approx(share, rel=1e-5)

    def test_probes_of_gates_memory_and_sizes_match_the_layer(self):
        m = model(allow_neg_eigval=True)
        probes, _ = make_probes(m, self.BATCH)
        values = probes.measure()
        mixer, inputs = m.model.blocks[0].mixer, []
        mixer.register_forward_pre_hook(lambda _, x: inputs.append(x))
        m(self.BATCH[0], use_cache=False)
        x, sequences, *_ = inputs[0]
        g, beta = mixer.gates(x, sequences)
        assert values["layers/0/beta_mean"] == pytest.approx(float(beta.mean() / 2), rel=1e-4)
        assert values["layers/0/beta_strong"] == pytest.approx(float((beta > 1).double().mean()))
        assert values["layers/0/alpha_mean"] == pytest.approx(float(g.exp().mean()), rel=1e-4)
        memory = (1 / (1 - g.exp().mean((0, 1)))).median()
        assert values["layers/0/memory"] == pytest.approx(float(memory), rel=1e-4)
        assert values["layers/0/hidden"] == pytest.approx(rms(m.model.embed(self.BATCH[0])), rel=1e-4)
        za = x @ mixer.a_proj.weight.T
        assert values["layers/0/gate_decay_std"] == pytest.approx(float(za.std()), rel=1e-4)

    def test_every_parameter_belongs_to_a_probe_group(self):
        m = model(attention_layers=[1], tie_word_embeddings=False)
        groups = {name: group_of(name) for name, _ in m.named_parameters()}
        assert set(groups.values()) == set(GROUPS) - {"residual"}
        assert groups["model.blocks.0.mixer.a_proj.weight"] == "gate_proj"
        assert groups["model.blocks.0.mixer.o_norm.weight"] == "norm" == groups["model.norm.weight"]
        assert group_of("model.blocks.0.mixer_residual.beta.weight") == "residual"


def test_observing_a_model_leaves_outputs_unchanged_and_sees_its_tensors():
    m, ids = model(num_v_heads=8, num_hidden_layers=5, attention_layers=[1]), tokens(2, 20)
    plain = m(ids, use_cache=False).logits
    with observed(m) as view:
        seen = m(ids, use_cache=False).logits
    assert torch.equal(plain, seen) and torch.equal(m(ids, use_cache=False).logits, seen)
    assert set(view.mixers) == {0, 3, 4}
    for mixer in view.mixers.values():
        q, k, v = mixer.split()
        g, beta = mixer.gates()
        arguments = (normalized(q), normalized(k), v, g, beta)
        o, state = gated_delta_rule(
            *arguments, scale=mixer.mixer.scale, output_final_state=True, backend="recurrent"
        )
        assert torch.allclose(o, mixer.o, rtol=1e-9, atol=1e-12)
        assert torch.allclose(state, mixer.state(), rtol=1e-9, atol=1e-12)


class TestTraining:
    def test_probes_leave_training_unchanged_to_the_last_bit(self, data: Path, tmp_path: Path):
        for name, probing in (("with", "true"), ("without", "false")):
            train("run", "tiny", *keys(data, tmp_path / name, log__probes=probing))
        probed = [line.pop("probes", None) for line in read_metrics(tmp_path / "with")]
        assert [i for i, values in enumerate(probed) if values] and not any(
            "probes" in line for line in read_metrics(tmp_path / "without")
        )
        kept, plain = final_state(tmp_path / "with"), final_state(tmp_path / "without")
        for row in kept["metrics"]:
            row.pop("probes", None)
        assert kept == plain

    def test_every_quantity_of_the_papers_appendices_is_measured_and_drawn(self, data: Path, tmp_path: Path):
        """These are appendices C and D of arXiv:2606.04048, under their names in metrics.jsonl."""
        runs = [tmp_path / str(width) for width in (16, 32)]
        for run in runs:
            changes = {"log.probes": "true", "steps": 8, "model.width": run.name, "sample.tokens": 0}
            train("run", "tiny", *keys(data, run, **changes))
        probes = load_probes(RunFolder(runs[0]))
        assert probes is not None and [step for step, _ in probes.series] == [6, 8]
        for _, values in probes.series:
            assert all(math.isfinite(v) for v in values.values())
            assert values["groups/main_proj/update"] > 0 and values["layers/1/grad_q"] > 0
        drawn = {name for name, _ in PANELS}
        sizes, gradients = {"q", "k"}, {"grad_q", "grad_k", "grad_hidden"}
        gates = {"beta_mean", "beta_strong", "gate_decay_std", "gate_beta_std"}
        assert sizes | gradients | gates <= drawn and {name for name, _ in PLACES} == {"qk", "Sk"}
        assert probes.names("layers/") == ["0", "1"]
        for layer in ("layers/0", "layers/1"):
            for name in drawn:
                steps, values = probes.curve(f"{layer}/{name}")
                assert steps == [6, 8] and math.isfinite(values[0]), name
            assert probes.names(f"{layer}/qk/") == ["0", "2", "4", "6", "8", "10", "12", "14", "15"]
            assert probes.names(f"{layer}/Sk/") == ["2", "4", "6", "8", "10", "12", "14"]
        assert f"{runs[0] / 'probes.png'}" in train("plot", runs[0])
        alone = (runs[0] / "probes.png").read_bytes()
        assert alone.startswith(b"\x89PNG")
        train("plot", *runs)
        assert (runs[0] / "probes.png").read_bytes() != alone

    def test_plotting_runs_without_probes_says_how_to_get_them(self, data: Path, tmp_path: Path):
        train("run", "tiny", *keys(data, tmp_path / "a", steps=2, sample__tokens=0))
        assert "probes.png" not in train("plot", tmp_path / "a")
        status, _, err = run_command("plot", tmp_path / "a", tmp_path / "a")
        assert status == 2 and "train with log.probes=true" in err


class LinearConvolution(nn.Module):
    """Computes the short convolution without its SiLU."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, sequences: Sequences, cache: None = None) -> Tensor:
        channels, taps = self.weight.shape
        y = F.conv1d(F.pad(x, (0, 0, taps - 1, 0)).transpose(1, 2), self.weight[:, None], groups=channels)
        return y.transpose(1, 2)


class TestGradientExponents:
    """Gradients at initialization are powers of width, for an upstream gradient of entries 1/d.

    The learning rates in section 4 of arXiv:2606.04048 follow from these powers.
    """

    THEORY = {  # noqa: RUF012
        "v_proj.weight": -1.0,
        "q_proj.weight": -1.0,
        "k_proj.weight": -1.0,
        "g_proj.weight": -1.0,
        "a_proj.weight": -0.5,
        "b_proj.weight": -0.5,
        "dt_bias": -0.5,
        "A_log": -0.5,
        "o": -0.5,
    }

    @staticmethod
    def gradients(width: int, seed: int, silu: bool) -> dict[str, float]:
        sizes = {"hidden_size": width, "base_width": 64, "num_hidden_layers": 1, "num_heads": 2}
        m = model(seed, torch.float32, **sizes, initializer_range=0.125, rms_norm_eps=1e-12)
        layer = m.model.blocks[0].mixer
        seen = watch_outputs(layer)
        if not silu:
            layer.conv = LinearConvolution(layer.conv.weight)
        generator = torch.Generator().manual_seed(seed)
        y = layer(torch.randn(4, 64, width, generator=generator), Sequences.rows(64, torch.device("cpu")))
        y.backward(torch.randn(y.shape, generator=generator) / width)
        sizes = {name: rms(p.grad) for name, p in layer.named_parameters() if p.grad is not None}
        return {**sizes, "o": rms(seen[0].grad * layer.scale)}

    @classmethod
    def slopes(cls, silu: bool) -> dict[str, Line]:
        places, sizes = [], defaultdict(list)
        for width in (64, 128, 256, 512):
            for seed in range(4):
                places.append(math.log2(width))
                for name, value in cls.gradients(width, seed, silu).items():
                    sizes[name].append(math.log2(value))
        return {name: line(places, values) for name, values in sizes.items()}

    def test_gradient_exponents_without_silu_are_the_papers(self):
        fits = self.slopes(silu=False)
        for name, power in self.THEORY.items():
            fit = fits[name]
            assert abs(fit.slope - power) < 0.1 + 2 * fit.stderr, (
                f"{name}: {fit.slope:.2f} ± {fit.stderr:.2f}"
            )
        # the errors are small enough to tell the two laws apart
        for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight"):
            assert fits[name].stderr < 0.1

    def test_silu_lowers_the_gradient_exponents_of_queries_and_keys(self):
        """The positive mean of SiLU makes q.k = Theta(1). Their gradients begin between 1/d and d^-3/2."""
        fits = self.slopes(silu=True)
        for name in ("q_proj.weight", "k_proj.weight"):
            fit = fits[name]
            assert -1.5 < fit.slope < -1.0 - 2 * fit.stderr, f"{name}: {fit.slope:.2f} ± {fit.stderr:.2f}"
        assert abs(fits["v_proj.weight"].slope + 1) < 0.1
        assert abs(fits["b_proj.weight"].slope + 0.5) < 0.15
