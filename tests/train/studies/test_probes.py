"""Probes compute the documented formulas, leave training unchanged, and can be plotted."""

import math
from pathlib import Path

import pytest
import torch

from delta_trn.backends import gated_delta_rule
from delta_trn.train.checkpoints.run_folder import RunFolder
from delta_trn.train.data.loader import Batch
from delta_trn.train.studies.probe_plots import PANELS, load_probes
from delta_trn.train.studies.probes import measure, normalize, observe, recall, rms
from tests.support.tiny_models import model, tokens
from tests.support.tiny_run import final_state, keys, read_metrics, run_command, train


class TestFormulas:
    BATCH = Batch(tokens(2, 17)[:, :-1], tokens(2, 17)[:, 1:])

    def test_recall_is_one_for_keys_that_point_anywhere_and_sqrt_K_for_the_written_one(self):
        """E (S^T k)^2 = |S|^2 / K for k uniform on the sphere; 4000 keys leave a percent or two."""
        generator = torch.Generator().manual_seed(0)
        S = torch.randn(1, 1, 8, 16, generator=generator).expand(4000, 1, 8, 16)
        k = torch.randn(4000, 1, 8, generator=generator)
        assert recall(S, k) == pytest.approx(1, abs=0.03)
        # the only written key, and one that is none
        k = normalize(torch.tensor([[[3.0, 4.0, 0, 0]]]))
        S = torch.einsum("bhk,v->bhkv", k, torch.arange(1.0, 6.0))
        assert recall(S, 7 * k) == pytest.approx(2, rel=1e-5)
        assert recall(S, torch.tensor([[[4.0, -3.0, 0, 0]]])) == pytest.approx(0, abs=1e-6)

    def test_gradient_probes_are_of_the_loss_summed_over_tokens(self):
        """So repeating the sequences keeps the gradients of each."""
        m = model()
        twice = self.BATCH.each(lambda x: x.repeat(2, 1))
        a, b = (measure(m, m.loss, batch) for batch in (self.BATCH, twice))
        for name in ("q", "k", "hidden"):
            key = f"layers/1/grad_{name}"
            assert b[key] == pytest.approx(a[key], rel=1e-4) and a[key] > 0

    def test_probes_of_gates_memory_and_sizes_match_the_layer(self):
        m = model(allow_neg_eigval=True)
        values = measure(m, m.loss, self.BATCH)
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
        assert values["layers/0/hidden"] == pytest.approx(
            rms(m.model.embed(self.BATCH[0])), rel=1e-4
        )
        za = x @ mixer.a_proj.weight.T
        assert values["layers/0/gate_decay_std"] == pytest.approx(float(za.std()), rel=1e-4)


def test_observing_a_model_leaves_outputs_unchanged_and_sees_its_tensors():
    m, ids = model(num_v_heads=8, num_hidden_layers=5, attention_layers=[1]), tokens(2, 20)
    plain = m(ids, use_cache=False).logits
    with observe(m) as (mixers, _):
        seen = m(ids, use_cache=False).logits
    assert torch.equal(plain, seen) and torch.equal(m(ids, use_cache=False).logits, seen)
    assert set(mixers) == {0, 3, 4}
    for mixer in mixers.values():
        q, k, v = mixer.split()
        g, beta = mixer.gates()
        arguments = (normalize(q), normalize(k), v, g, beta)
        o, state = gated_delta_rule(
            *arguments, scale=mixer.mixer.scale, output_final_state=True, backend="recurrent"
        )
        assert torch.allclose(o, mixer.o, rtol=1e-9, atol=1e-12)
        assert torch.allclose(state, mixer.state(20), rtol=1e-9, atol=1e-12)


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

    def test_every_quantity_of_the_papers_appendices_is_measured_and_drawn(
        self, data: Path, tmp_path: Path
    ):
        """These are appendices C and D of arXiv:2606.04048, under their names in metrics.jsonl."""
        runs = [tmp_path / str(width) for width in (16, 32)]
        for run in runs:
            changes = {
                "log.probes": "true",
                "steps": 8,
                "model.width": run.name,
                "sample.tokens": 0,
            }
            train("run", "tiny", *keys(data, run, **changes))
        probes = load_probes(RunFolder(runs[0]))
        assert probes is not None and [step for step, _ in probes.series] == [6, 8]
        for _, values in probes.series:
            assert all(math.isfinite(v) for v in values.values())
            assert values["layers/1/grad_q"] > 0
        sizes, gradients = {"q", "k"}, {"grad_q", "grad_k", "grad_hidden"}
        gates = {"beta_mean", "beta_strong", "gate_decay_std", "gate_beta_std"}
        assert sizes | gradients | gates <= set(PANELS)
        assert probes.names("layers/") == ["0", "1"]
        for layer in ("layers/0", "layers/1"):
            for name in PANELS:
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
