"""distribution.mode=zero1 resumes as if it had never stopped;
the optimizer's memory is where it is used.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_trn.train.parallel.sharding import Sharding
from tests.support import team_run, tiny_run
from tests.support.tiny_run import final_state

ZERO1 = {"distribution__mode": "zero1", "optimizer__name": "adamw"}


def run_in_two_parts(data: Path, tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """Returns the folder of a run, and of the same run that was stopped and resumed."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    keys = {**ZERO1, "schedule__decay_steps": 8, **changes}
    team_run.train(
        2, ["run", "tiny", *tiny_run.keys(data, whole, steps=8, **keys)], tmp_path / "logs"
    )
    team_run.train(
        2, ["run", "tiny", *tiny_run.keys(data, parts, steps=4, **keys)], tmp_path / "first"
    )
    team_run.train(2, ["resume", parts, "steps=8", "evaluation.every=6"], tmp_path / "second")
    return whole, parts


def test_a_zero1_run_resumes_bit_for_bit_on_two_processes(data, tmp_path):
    """Risk 3."""
    whole, parts = run_in_two_parts(data, tmp_path)
    expected, resumed = final_state(whole, "step-00000008"), final_state(parts, "step-00000008")
    names = [name for name in expected if name.endswith(".safetensors")]
    assert sum(name.startswith("optimizer-") for name in names) == 2, (
        "each process has a part of the memory"
    )
    assert [name for name in names if expected[name] != resumed[name]] == []
    assert expected["metrics"][-1] == resumed["metrics"][-1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_zero1_run_resumes_on_two_gpus(data, tmp_path):
    """Risk 3: fused AdamW on CUDA refused a `step` that was loaded to the host."""
    whole, parts = run_in_two_parts(data, tmp_path, device="cuda")
    assert len(final_state(whole)["metrics"]) == len(final_state(parts)["metrics"])


def load_step(*, fused: bool) -> torch.Tensor:
    """Returns AdamW's `step` after slots of the host were loaded
    for a parameter of another device.
    """
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [parameter], "names": ["w"]}], lr=0.1)
    optimizer.param_groups[0]["fused"] = fused  # its constructor looks for the kernel of the device
    sharding = Sharding(nn.Linear(1, 1))  # type: ignore[arg-type]
    slots = {
        "w/step": torch.tensor(7.0),
        "w/exp_avg": torch.zeros(3),
        "w/exp_avg_sq": torch.zeros(3),
    }
    sharding.load_slots(optimizer, slots)
    assert optimizer.state[parameter]["exp_avg"].device.type == "meta"
    return optimizer.state[parameter]["step"]


def test_step_is_loaded_to_the_device_where_fused_adamw_counts_it():
    """Risk 3, without a GPU: a device that is not the host stands in for it."""
    assert load_step(fused=True).device.type == "meta"


def test_step_stays_on_the_host_where_adamw_is_not_fused():
    """The check above can fail: only fused AdamW counts on the device."""
    step = load_step(fused=False)
    assert step.device.type == "cpu" and step == 7
