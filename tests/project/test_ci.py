"""CI is green only where every target passed within its limit, and says the minutes of each."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

ROOT = Path(__file__).parents[2]
# stands for make: writes down what it was called with, and does what a file of the target's name says
MAKE = """#!/bin/sh
echo "$1 DRY=$DRY PART=$PART" >> "$CALLS"
case $1 in */.ready) [ ! -e "$FAULTS/$1" ] || exit 1; mkdir -p "${1%/.ready}"; : > "$1"; exit;; esac
[ ! -e "$FAULTS/$1" ] || . "$FAULTS/$1"
"""
TARGETS = ["test", "lint", "measure", "measure-trn1", "test-lm-eval", "test-trl", "test-fresh",
           "test-xla", "compile", "emulate"]  # fmt: skip


class Checkout:
    """A folder with CI's script and with programs that stand for make, node, df and git."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults, self.programs = folder, folder / "faults", folder / "programs"
        for path in (self.faults, self.programs, folder / ".ci"):
            path.mkdir()
        shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
        self.program("make", MAKE)
        self.program("node", "#!/bin/sh\n")
        self.program("df", "#!/bin/sh\necho Avail; echo 99999999\n")
        self.program("git", "#!/bin/sh\necho 7\n")

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def fault(self, target: str, line: str = "exit 2") -> None:
        path = self.faults / target
        path.parent.mkdir(exist_ok=True)
        path.write_text(line + "\n")

    def edit(self, old: str, new: str) -> None:
        script = self.folder / ".ci" / "run"
        text = script.read_text()
        assert text.count(old) == 1, old
        script.write_text(text.replace(old, new))

    def run(self) -> tuple[int, dict[str, str]]:
        """Returns the exit status, and the outcome of each target in the table at the end."""
        environment = {
            **os.environ,
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "CALLS": str(self.folder / "calls"),
            "FAULTS": str(self.faults),
        }
        done = subprocess.run(
            ["bash", ".ci/run"], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.stderr == ""
        _, table = done.stdout.split("\nminutes  target          outcome\n")
        rows = [re.fullmatch(r" *\d+\.\d  (\S+) +(.*)", line) for line in table.splitlines()]
        return done.returncode, {row[1]: row[2] for row in rows if row}

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_it_is_green_where_every_target_passed(checkout):
    status, outcomes = checkout.run()
    assert status == 0
    assert [name for name in outcomes if not name.startswith(".venv")] == TARGETS
    assert set(outcomes.values()) == {"passed", "installed"}
    assert "measure DRY=1 PART=" in checkout.calls
    # 7 commits: another part of each with the next commit
    assert "compile DRY= PART=8/12" in checkout.calls
    assert "emulate DRY= PART=2/6" in checkout.calls


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_fails_is_red_and_the_others_run(target, checkout):
    checkout.fault(target)
    status, outcomes = checkout.run()
    assert status == 1
    assert outcomes.pop(target) == "FAILED: exit status 2"
    assert set(outcomes.values()) == {"passed", "installed"} and set(TARGETS) - {target} < set(
        outcomes
    )


def test_a_target_that_is_not_done_in_time_is_red(checkout):
    checkout.edit("limited 300 lint", "limited 1 lint")
    checkout.fault("lint", "exec sleep 20")
    status, outcomes = checkout.run()
    assert status == 1 and outcomes["lint"] == "FAILED: it was not done within 1 s"
    assert outcomes["emulate"] == "passed"


def test_what_no_time_is_left_for_is_red(checkout):
    checkout.edit("END=5100", "END=1")
    checkout.fault("test", "sleep 2")
    status, outcomes = checkout.run()
    assert status == 1 and outcomes["test"] == "FAILED: it was not done within 1 s"
    assert outcomes["emulate"] == "FAILED: it was not started within 1 s"


def test_what_the_machine_has_no_room_or_no_packages_for_is_skipped_in_words(checkout):
    checkout.program("df", "#!/bin/sh\necho Avail; echo 1000\n")
    checkout.fault(".venv-trl/.ready")
    status, outcomes = checkout.run()
    assert status == 0
    room = "skipped: installing it takes 16000000 kB for a while, 1000 kB are free"
    assert outcomes["test-xla"] == outcomes["test-fresh"] == room
    assert outcomes["test-trl"] == "skipped: what it needs could not be installed within 120 s"
    made = [call.split()[0] for call in checkout.calls]
    assert not {"test-xla", ".venv-xla/.ready", "test-fresh", "test-trl"} & set(made)


def part(text: str, names: list[str]) -> tuple[list[str], list[str]]:
    """Returns which tests a part keeps of `names`, and which pytest is told to have left out."""
    left: list[str] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: text, hook=hook)
    conftest.pytest_collection_modifyitems(config, names)
    return names, left


def test_parts_of_the_tests_are_all_of_them_each_once():
    names = [f"test_{i}" for i in range(8)]
    kept = [part(f"{i}/3", [*names]) for i in (1, 2, 3)]
    assert kept[1] == (["test_1", "test_4", "test_7"], [n for n in names if n[-1] not in "147"])
    assert sorted(name for some, _ in kept for name in some) == names
    assert part("1/1", [*names]) == (names, [])


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "-1/2"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text} is no part; expected I/N"):
        part(text, ["test"])
