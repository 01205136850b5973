"""A run that is stored beside this file, as `record` wrote it, stays readable and goes on.

A change that breaks this breaks the runs that users have.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from delta_trn.models import DeltaModel
from tests.support.tiny_run import ONE_SUM, read_metrics, train
from tests.train.stored_run.record import CHECKPOINT, HERE, logits


@pytest.fixture
def run(tmp_path) -> Path:
    shutil.copytree(HERE / "data", tmp_path / "data")
    return shutil.copytree(HERE / "run", tmp_path / "run")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


def test_transformers_opens_a_stored_checkpoint_with_the_same_logits():
    model, report = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = torch.tensor(json.loads((HERE / "logits.json").read_text()))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=100 * ONE_SUM)
    backbone = DeltaModel.from_pretrained(CHECKPOINT)
    assert all(
        torch.equal(p, model.model.get_parameter(name)) for name, p in backbone.named_parameters()
    )


def test_a_stored_run_goes_on_where_it_stood(run):
    expected = losses(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    train("resume", run, f"data.folder={run.parent / 'data'}")
    assert losses(run) == pytest.approx(expected, rel=ONE_SUM)
    assert abs(expected[3] - expected[2]) > 100 * ONE_SUM * expected[2], (
        "a step changes too little to tell"
    )
