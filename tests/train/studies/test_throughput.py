"""`delta-trn throughput` times a step, and the same model with a peer's operator."""

import json
from dataclasses import replace

import pytest
import torch

from delta_trn.backends import gated_delta_rule, kimi_delta_attention
from delta_trn.backends.bench.peers import PEERS
from delta_trn.backends.gated_delta_rule import chunked
from delta_trn.train.recipes import recipe
from delta_trn.train.settings.overrides import apply
from delta_trn.train.studies import throughput
from delta_trn.train.studies.throughput import OURS, Workload, measure
from tests.support.tiny_run import run_command

TINY = {"batch.sequences": "4", "batch.length": "32", "data.vocab_size": "320", "device": "cpu"}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(apply(recipe("tiny"), TINY))


def replace_peer(name, rule):
    peer = PEERS[name]
    return {
        **PEERS,
        name: replace(peer, devices=("cpu",), load=lambda: rule, load_channels=lambda: rule),
    }


def test_throughput_prints_and_writes_tokens_per_second_without_a_peer_that_is_not_here(tmp_path):
    file = tmp_path / "throughput.jsonl"
    keys = [f"{key}={value}" for key, value in TINY.items()]
    peers = ("--peer", "hf", "--peer", "fla")
    status, out, err = run_command(
        "throughput", "tiny", *keys, *peers, "--rounds", "2", "--json", file
    )
    assert status == 0, err
    assert "delta rule by chunked on cpu" in out and "times ours" in out
    assert "peer fla: not yet run, " in out and "fla   " not in out
    assert (
        run_command("throughput", "tiny", "--rounds", "1")[2].count(
            "--rounds=1: expected at least 2"
        )
        == 1
    )
    ours, theirs = (json.loads(line) for line in file.read_text().splitlines())
    assert (ours["contender"], theirs["contender"]) == (OURS, "hf")
    assert ours["ratio"] is None and theirs["ratio"]["p50"] > 0
    assert ours["tokens_per_s"] == pytest.approx(4 * 32 / (ours["ms"]["p50"] / 1e3))
    assert {"commit", "torch", "device", "recipe", "width"} <= set(ours)


def test_a_peers_operator_replaces_ours_only_where_requested(workload):
    called = []

    def counting(*tensors, **options):
        called.append(options["use_gate_in_kernel"])
        return gated_delta_rule(*tensors, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "PEERS", replace_peer("hf", counting))
        workload.loss_of("hf")
        layers = workload.model.config.num_hidden_layers
        assert called == [True] * layers
        workload.loss_of(OURS)
        assert len(called) == layers


def test_a_peer_with_another_loss_is_not_timed(workload, monkeypatch):
    def wrong(*tensors, **options):
        o, state = gated_delta_rule(*tensors, **options)
        return o.roll(1, dims=1), state

    monkeypatch.setattr(throughput, "PEERS", replace_peer("hf", wrong))
    with pytest.raises(throughput.TrainError, match="not timed: with hf's operator the loss is"):
        measure(workload, ("hf",), 2)


def test_throughput_is_not_timed_while_parity_fails(workload, monkeypatch, without_cpu_kernel):
    correct = chunked.decays
    monkeypatch.setattr(chunked, "decays", lambda *tensors: [1.01 * x for x in correct(*tensors)])
    with pytest.raises(throughput.TrainError, match="parity is red"):
        throughput.require_parity(workload.config, workload.device)


def test_kimi_delta_attention_is_timed_behind_its_own_parity_beside_a_peers(monkeypatch):
    asked, called = [], []

    def counting(*tensors, **options):
        called.append(options["lower_bound"])
        return kimi_delta_attention(*tensors, **options)

    monkeypatch.setattr(throughput, "verdicts", lambda case, *where: asked.append(case.op) or [])
    keys = {"model.mixer": "kimi_delta_attention", "model.decay_bound": "-5", **TINY}
    workload = Workload(apply(recipe("tiny"), keys))
    throughput.require_parity(workload.config, workload.device)
    assert asked == ["kimi_delta_attention"] * 2
    monkeypatch.setattr(throughput, "PEERS", replace_peer("fla", counting))
    ours, theirs = measure(workload, ("fla",), 2)
    assert theirs["loss"] == ours["loss"] and set(called) == {-5.0}


def test_timing_leaves_the_weights_unchanged(workload):
    before = {name: x.clone() for name, x in workload.model.state_dict().items()}
    workload(OURS)
    assert all(torch.equal(x, before[name]) for name, x in workload.model.state_dict().items())
