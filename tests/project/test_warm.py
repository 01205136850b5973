"""A process that forks from a warm one is to a program what a new one is."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver

import pytest

from tests.support.warm import SERVER, run_python

TOLD = """
import os, sys, threading, torch
print(sys.argv[1:], os.getcwd(), os.environ.get("ABOVE"), __name__, torch.get_num_threads())
from beside import name
threading.Timer(0.1, lambda: print("at last", name)).start()
print("to stderr", file=sys.stderr)
"""


def test_it_has_the_folder_variables_arguments_and_modules_of_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setenv("ABOVE", "not to be seen")
    for folder, name in (("there", "in PYTHONPATH"), ("here", "in the folder")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"name = {name!r}\n")
    paths = os.pathsep.join(filter(None, [str(tmp_path / "there"), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    options = {"env": environment, "cwd": tmp_path / "here"}
    done = run_python(["-c", TOLD, "one", 2], **options)
    fresh = subprocess.run(
        [sys.executable, "-c", TOLD, "one", "2"], capture_output=True, text=True, **options
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, fresh.stdout, fresh.stderr)
    assert "None __main__ 1\nat last in the folder" in done.stdout


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("raise ValueError('loud')", 1, "ValueError: loud\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_a_new_one_does(program, status, said):
    done = run_python(["-c", program])
    assert (
        done.returncode == status and done.stderr.endswith(said) and bool(said) == bool(done.stderr)
    )


def test_modules_and_files_run_too_and_one_that_hangs_is_ended(tmp_path):
    (tmp_path / "alone.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    for words in (["-m", "alone", "x"], [str(tmp_path / "alone.py"), "x"]):
        assert run_python(words, cwd=tmp_path).stdout == "__main__ ['x']\n"
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(60)"], timeout=0.5)


POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
@dataclass
class Square:
    of: int
def square(i): return Square(i * i)
if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool: print(*pool.map(square, range(3)))
    print(multiprocessing.get_start_method())
"""


def test_its_own_processes_start_as_those_of_a_new_one(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    for words in (["-m", "pool"], [str(tmp_path / "pool.py")]):
        done = run_python(words, cwd=tmp_path, timeout=100)
        squares, method = done.stdout.splitlines()
        assert squares == "Square(of=0) Square(of=1) Square(of=4)", done.stderr
        assert method == multiprocessing.get_start_method()


def test_it_knows_nothing_of_what_this_process_did(monkeypatch):
    monkeypatch.setattr("delta_trn.backends.dispatch.BACKENDS", {})
    done = run_python(
        ["-c", "from delta_trn.backends.dispatch import BACKENDS; print(len(BACKENDS))"]
    )
    assert int(done.stdout) > 2


def test_it_is_not_the_one_that_a_sweep_forks_from():
    """Which may have begun with Triton's interpreter: nothing compiles there."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import triton; print(type(triton.language.cdiv).__name__)"
    done = run_python(["-c", program], env=variables)
    assert done.stdout != "InterpretedFunction\n" and done.returncode == 0, done.stderr
    assert SERVER._forkserver_pid != forkserver._forkserver._forkserver_pid
