"""What an earlier version wrote is read: this folder has a run of commit e89a490, stopped at step
3.

The names of its weights have no `model.` before the backbone's, and its configuration has keys that
are gone. It was made by `delta-trn run tiny` with model.tie_word_embeddings=false, one layer of
each mixer, and width / base_width of 2. Its metrics.jsonl has all 6 steps.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from delta_trn.models import DeltaModel
from tests.support.tiny_run import ONE_SUM, read_metrics, train

EARLIER = Path(__file__).parent
CHECKPOINT = EARLIER / "run" / "checkpoints" / "step-00000003"
# of this checkpoint, as e89a490 computed them: the logits of the ids 65 to 68 after 65, 66, ... 74
LOGITS = [
    -0.0036137362476438284,
    -0.033180441707372665,
    -0.021428346633911133,
    -0.026302438229322433,
]


@pytest.fixture
def run(tmp_path) -> Path:
    shutil.copytree(EARLIER / "data", tmp_path / "data")
    return shutil.copytree(EARLIER / "run", tmp_path / "run")


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


def test_transformers_opens_weights_with_the_names_of_an_earlier_version():
    assert "embed.weight" in load_file(CHECKPOINT / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(torch.arange(65, 75)[None]).logits[0, -1, 65:69]
    torch.testing.assert_close(logits, torch.tensor(LOGITS), rtol=0, atol=100 * ONE_SUM)
    backbone = DeltaModel.from_pretrained(CHECKPOINT)
    assert all(
        torch.equal(p, model.model.get_parameter(name)) for name, p in backbone.named_parameters()
    )


def test_an_earlier_run_goes_on_where_it_stood(run):
    expected = losses(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    train("resume", run, f"data.folder={run.parent / 'data'}")
    assert losses(run) == pytest.approx(expected, rel=ONE_SUM)
    assert abs(expected[3] - expected[2]) > 100 * ONE_SUM * expected[2], (
        "a step changes too little to tell"
    )
