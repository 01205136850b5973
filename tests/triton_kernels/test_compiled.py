"""A few cases run compiled, in the emulator, in a process of its own;
`make emulate` runs the rest.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from delta_trn.triton_kernels.launch import arithmetic

HERE = Path(__file__).parent
JUDGED = HERE.parent / "parity" / "test_parity.py::test_backend_agrees_with_the_judge"
CASES = "packed_empty-float16", "kimi_reset_packed-bfloat16", "kimi_bound-bfloat16"
SHOWN = (
    "test_parity.py::test_parity_fails_where_a_tile_is_overwritten_before_its_product_is_done",
    "test_emulator.py::test_softmax_without_its_barrier_is_reported",
    "test_emulator.py::test_a_pipelined_tile_that_is_multiplied_and_read_loses_a_race",
    "test_gated_delta_rule.py::test_exp_softplus_and_sigmoid_keep_the_digits_of_what_is_small",
    "test_hopper.py::test_gluon_is_as_exact_as_the_plain_kernel[late-packed]",
    "test_hopper.py::test_gradients_agree_with_the_judge[packed_groups_of_three]",
    "test_emulator.py::test_an_unknown_instruction_is_refused_by_name",
)


@pytest.mark.skipif(arithmetic() != "interpreted", reason="here all tests run compiled kernels")
def test_compiled_kernels_agree_and_their_races_are_seen():
    """Among them are the two races that no interpreter shows, each with its mend taken out."""
    chosen = [f"{JUDGED}[triton-{case}]" for case in CASES] + [str(HERE / name) for name in SHOWN]
    command = [sys.executable, "-m", "pytest", "--emulate", "-p", "no:cacheprovider", *chosen]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE.parents[1], env=environment
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
