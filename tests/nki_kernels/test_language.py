"""Where kernels get NKI from: AWS's package, our simulator, or a sentence that says what to install."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm import run_python

ROOT = Path(__file__).parents[2]
# hides a package from find_spec, as where it is not installed
HIDE = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(name)

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else find(name, package)
"""


def run_import_site(path):
    code = (
        "from delta_trn.nki_kernels.language import RUNTIME, SAYS_SUMS, nki\n"
        "print(RUNTIME, nki.__name__, SAYS_SUMS)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(path)},
        timeout=60,
    )


@pytest.mark.skipif(
    importlib.util.find_spec("nki") is not None, reason="the real nki is installed here"
)
def test_without_nki_the_import_site_takes_the_simulator(tmp_path):
    assert run_import_site(tmp_path).stdout.split() == [
        "simulator",
        "nki_simulator.kernel",
        "False",
    ]


def test_with_nki_the_import_site_takes_it(tmp_path):
    package = tmp_path / "nki"
    package.mkdir()
    for name in ("__init__", "isa", "language"):
        (package / f"{name}.py").touch()
    for options, says in (("", "False"), (", accumulate=None", "True")):
        (package / "isa.py").write_text(f"def nc_matmul(dst, stationary, moving{options}): ...")
        assert run_import_site(tmp_path).stdout.split() == ["neuron", "nki", says]


def test_a_broken_nki_fails_loudly(tmp_path):
    (tmp_path / "nki.py").write_text("raise ImportError('driver is missing')")
    done = run_import_site(tmp_path)
    assert done.returncode != 0 and "driver is missing" in done.stderr


def run_without(code: str, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(names=names) + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


def test_without_nki_and_the_simulator_the_import_site_names_the_command_that_installs_it():
    done = run_without("import delta_trn.nki_kernels.language", "nki", "nki_simulator")
    assert done.returncode != 0
    assert "pip install ./packages/nki-simulator" in done.stderr.splitlines()[-1]


REFUSED = """
import torch
from delta_trn import BackendRefusal, describe, gated_delta_rule

x = torch.ones(1, 2, 1, 16)
g = -torch.ones(1, 2, 1)
gated_delta_rule(x, x, x, g, -g)
try:
    gated_delta_rule(x, x, x, g, -g, backend="nki-simulator")
except BackendRefusal as refusal:
    print(refusal)
describe()

from delta_trn.train.commands import warmup
warmup.main(["tiny", "--list", "data.source=.", "device=xla"])
from delta_trn.__main__ import main
print(main(["simulator", "calibrate"]))
"""


def test_what_needs_the_simulator_names_the_command_that_installs_it():
    """The operation, `warmup --list` and `delta-trn simulator`; the other backends run as before."""
    done = run_without(REFUSED, "nki", "nki_simulator")
    assert done.returncode == 0, done.stderr
    *_, status = done.stdout.strip().splitlines()
    install = "pip install ./packages/nki-simulator"
    assert install in done.stdout.split("instructions of the NKI kernels")[0]
    assert install in done.stdout.split("not counted:")[1]
    assert install in done.stderr and status == "2"


def test_delta_trn_simulator_finds_our_kernels_by_their_last_name():
    command = ["-m", "delta_trn", "simulator", "report", "short_convolution", "T=9,C=8"]
    done = run_python(command, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and "lower bound" in done.stdout, done.stderr
