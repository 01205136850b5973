"""What only Triton's interpreter shows runs in it, in a process of its own, with a few of parity's cases."""

import subprocess
import sys
from pathlib import Path

import pytest

from delta_trn.backends.dispatch import TRITON_DEVICES

HERE = Path(__file__).parent
INTERPRETED = (
    "test_interpreted_launches_overlap_only_without_the_lock",
    "test_equal_keys_keep_their_digits_whatever_order_products_add_in",
)
PARITY = HERE.parent / "backends" / "test_parity.py"


@pytest.mark.skipif("cpu" not in TRITON_DEVICES, reason="these tests run where no emulator runs the others")
def test_the_interpreter_agrees_where_it_is_kept():
    """It bears addresses of 2^31 elements, and products that add in another order."""
    judged = f"{PARITY}::test_backend_agrees_with_the_judge"
    cases = ["triton-seam_65-float32", "triton-packed_empty-bfloat16", "triton-norm_head-float32"]
    names = [f"{judged}[{case}]" for case in cases]
    chosen = [str(HERE / "test_addresses.py"), *names]
    chosen += [f"{HERE / 'test_extremes.py'}::{test}" for test in INTERPRETED]
    command = [sys.executable, "-m", "pytest", "--interpret", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
