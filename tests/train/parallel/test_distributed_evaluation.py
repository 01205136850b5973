"""Data-parallel shares divide an evaluation: together they go through each held-out token once."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from delta_trn.models import DeltaForCausalLM
from delta_trn.train.__main__ import main
from delta_trn.train.data.loader import Batch
from delta_trn.train.parallel.layout import Layout, layout_of
from delta_trn.train.parallel.team import Team
from delta_trn.train.recipes import recipe
from delta_trn.train.run import loop
from delta_trn.train.run.evaluate import crops_at_once, evaluate, windows_at_once
from delta_trn.train.settings.overrides import apply
from tests.support import team_run, tiny_run

CPU = torch.device("cpu")
# after one step of warmup, whose learning rate is 0, all runs have the same weights
CHANGES: dict[str, Any] = {
    "steps": 1,
    "batch.length": 16,
    "model.heads": 4,
    "model.width": 32,
    "evaluation.sequences": 6,
    "evaluation.final_tokens": 10**6,
    "evaluation.batch": 3,
}
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {  # processes, data-parallel shares
    "ddp-2": (2, 2, {}),
    "fsdp-2": (2, 2, {"distribution.mode": "fsdp"}),
    "context-2": (2, 1, {"distribution.context": 2}),
    "ddp-4": (4, 4, {"batch.sequences": 8}),
    "tensor-2-fsdp-2": (4, 2, {"distribution.mode": "fsdp", "distribution.tensor": 2}),
}
QUICK = {"ddp-2", "fsdp-2"}


class OneOfMany(Team):
    """A share whose reduction leaves what it has, so that a test sees every share's part."""

    def mean(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("shares", [1, 2, 3, 5, 8])
def test_shares_add_up_to_the_mean_over_every_token_once(shares):
    """Risk 5: every share went through all crops. The last batch is smaller,
    and the last turn too short.
    """
    batches = [Batch(torch.full((2, 3), float(i)), torch.zeros(2, 3)) for i in range(6)]
    batches.append(Batch(torch.full((1, 3), 9.5), torch.zeros(1, 3)))
    evaluations, calls = [], []
    for rank in range(shares):
        seen: list[float] = []

        def loss(inputs: Tensor, *_: object, seen: list[float] = seen) -> Tensor:
            seen.append(float(inputs.mean()))
            return inputs.mean()

        team = OneOfMany(rank=rank, world=shares, data_rank=rank, data_world=shares)
        evaluations.append(evaluate(loss, iter(batches), CPU, team))
        calls.append(seen)
    alone = evaluate(lambda inputs, *_: inputs.mean(), batches, CPU)
    assert sum(e.loss for e in evaluations) / shares == pytest.approx(alone.loss, rel=1e-15)
    assert {e.tokens for e in evaluations} == {alone.tokens} == {39}
    turns = {len(seen) for seen in calls}
    assert turns == {-(-7 // shares)}, "a divided model needs all processes for every batch"
    assert {x for seen in calls for x in seen} == {0, 1, 2, 3, 4, 5, 9.5}


def test_no_share_is_without_crops_or_windows_where_there_are_enough():
    config = apply(
        recipe("tiny"), {"evaluation.sequences": "12", "evaluation.final_tokens": "1600"}
    )
    layouts = [Layout(shares, 4, 4, 16) for shares in (1, 2, 3, 4, 6, 12, 24)]
    assert [crops_at_once(config, layout) for layout in layouts] == [4, 4, 4, 3, 2, 1, 1]
    config = apply(config, {"evaluation.batch": "6", "batch.length": "16"})
    assert [crops_at_once(config, layout) for layout in layouts] == [6, 6, 4, 3, 2, 1, 1]
    assert [windows_at_once(config, layout) for layout in layouts] == [6, 6, 6, 6, 6, 6, 5]


def count_work(arguments: list[str], log: str) -> None:
    """Runs training, and reports how many held-out sequences this process computed,
    and its samples.
    """
    counts = {"sequences": 0, "samples": 0}
    compute, sample = DeltaForCausalLM.loss, loop.continue_text

    def loss(self: Any, inputs: Tensor, *others: Any, **options: Any) -> Tensor:
        counts["sequences"] += 0 if torch.is_grad_enabled() else len(inputs)
        return compute(self, inputs, *others, **options)

    def continue_text(*arguments: Any, **options: Any) -> str:
        counts["samples"] += 1
        return sample(*arguments, **options)

    DeltaForCausalLM.loss, loop.continue_text = loss, continue_text  # type: ignore[method-assign]
    tiny_run.redirect_output(log)
    status = main(arguments)
    Path(log).with_suffix(".counts").write_text(json.dumps(counts))
    os._exit(status)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    tiny_run.train("run", "tiny", *tiny_run.keys(data, out, **CHANGES))
    return out


def losses(run: Path) -> tuple[float, float, int]:
    """Returns the loss on crops, that of the final evaluation, and its tokens."""
    (crops,) = (line["loss"] for line in tiny_run.read_metrics(run) if line["split"] == "val")
    final = json.loads((run / "summary.json").read_bytes())
    return crops, final["loss"], final["held_out"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in QUICK else [pytest.mark.slow]) for way in WAYS]
)
def test_processes_share_an_evaluation_and_find_the_loss_of_one(data, alone, tmp_path, way):
    """Risk 5: the loss is that of one process, for a share of the work each.
    One samples if it can.
    """
    world, shares, changes = WAYS[way]
    out, logs = tmp_path / "run", tmp_path / "logs"
    team_run.train(
        world,
        ["run", "tiny", *tiny_run.keys(data, out, **{**CHANGES, **changes})],
        logs,
        count_work,
    )
    (crops, final, tokens), (its_crops, its_final, its_tokens) = losses(out), losses(alone)
    one_sum = 300 * 2**-24  # tests/support/tiny_models.py derives it
    assert crops == pytest.approx(its_crops, rel=one_sum) and final == pytest.approx(
        its_final, rel=one_sum
    )
    assert tokens == its_tokens
    counts = [json.loads((logs / f"rank-{rank}.counts").read_text()) for rank in range(world)]
    every = 6 + tokens // 16
    # two evaluations, and at most one batch more in the last turn of each
    assert all(every / shares - 6 <= count["sequences"] <= every / shares + 6 for count in counts)
    divided = "distribution.mode" in changes
    assert [count["samples"] for count in counts] == [int(not divided)] + [0] * (world - 1)


def test_other_tokens_have_another_loss(data, alone, tmp_path):
    """The comparison can fail: half of the windows have another loss."""
    *_, tokens = losses(alone)
    keys = tiny_run.keys(
        data, tmp_path / "run", **{**CHANGES, "evaluation.final_tokens": tokens // 2}
    )
    tiny_run.train("run", "tiny", *keys)
    assert losses(tmp_path / "run")[1] != pytest.approx(losses(alone)[1], rel=10 * 300 * 2**-24)


def test_more_processes_have_fewer_sequences_each():
    """At the size of a real run: 12,000 crops took 53% of the time on 64 processes."""
    config = recipe("gdn_mup_adamw")
    work = []
    for world in (1, 2, 4, 8):
        layout = layout_of(config, world)
        size = crops_at_once(config, layout)
        turns = -(-(config.evaluation.sequences // size) // layout.shares)
        work.append(turns * size)
    assert all(2 * after <= before * 1.02 for before, after in pairwise(work)), work
