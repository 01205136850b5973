"""Compiles C++ kernels for this CPU when they are first needed, and loads them.

A compiled file lies in ~/.cache/delta-trn (or under XDG_CACHE_HOME), under a hash of all that it
depends on: the sources, the command, the compiler's version and the CPU's instructions. Processes
that need it at once wait for one of them. A failure is written down beside it, and nothing is tried
again until one of those changes. Whoever asks for a kernel computes in PyTorch where there is none.

    DELTA_TRN_CPU_KERNEL=0      compiles and loads nothing
    CXX                         the compiler, else g++, c++ or clang++
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from delta_trn.backends.machine import cpu_flags

SWITCH = "DELTA_TRN_CPU_KERNEL"
SECONDS = 120
FLAGS = (
    "-std=c++17 -O3 -march=native -fwrapv -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
)


@dataclass(frozen=True)
class Library:
    """A compiled library, or None, and a sentence that says what it is or why there is none."""

    functions: ctypes.CDLL | None
    note: str


class NotCompiled(Exception):
    """Nothing is compiled here; the message says why."""


def lies_in_memory(x: Tensor) -> bool:
    """Returns whether x is a plain tensor on a CPU, whose numbers lie where its data_ptr says.

    A subclass may have a null pointer, as a divided model's DTensor has. A fake tensor stands for
    the plain one that torch.compile will run with, and must get the same answer.
    """
    return type(x) in (Tensor, Parameter, FakeTensor) and x.device.type == "cpu"


def load(source: Path, headers: Sequence[Path] = ()) -> Library:
    """Returns `source` as a library, compiled now or before. Never raises."""
    if os.environ.get(SWITCH) == "0":
        return Library(None, f"PyTorch, since {SWITCH}=0")
    try:
        path, version = build(source, headers)
        return Library(ctypes.CDLL(str(path)), f"a C++ kernel, compiled by {version}")
    except (NotCompiled, OSError, subprocess.SubprocessError, Timeout) as failure:
        reason = " ".join(str(failure).split())
        return Library(
            None, f"PyTorch, since the C++ kernel could not be compiled or loaded: {reason}"
        )


def build(source: Path, headers: Sequence[Path] = (), flags: str | None = None) -> tuple[Path, str]:
    """Returns `source` compiled, now or before, and the compiler's version; None: as a library."""
    flags = FLAGS if flags is None else flags
    command, version = _compiler()
    path = _folder() / f"{source.stem}-{_key([source, *headers], [command, flags, version])}.so"
    if not path.exists():
        _compile_once(command, source, path, flags)
    return path, version


def _compiler() -> tuple[str, str]:
    """Returns the compiler's command and the first line of its version."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    command = next((name for name in names if shutil.which(shlex.split(name)[0])), None)
    if command is None:
        raise NotCompiled(
            f"there is no {' and no '.join(names)}; install a C++ compiler, or name one in CXX"
        )
    answer = subprocess.run(
        [*shlex.split(command), "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    return command, answer.stdout.partition("\n")[0]


def _folder() -> Path:
    """Returns the folder of compiled files; one for this process alone
    where that cannot be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "delta-trn")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="delta-trn-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _key(files: Sequence[Path], words: Sequence[str]) -> str:
    parts = [
        *(file.read_bytes() for file in files),
        *map(str.encode, [*words, *sorted(cpu_flags())]),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


def _compile_once(command: str, source: Path, path: Path, flags: str) -> None:
    """Compiles to `path` unless another process does, or one has failed before."""
    failed = path.with_suffix(".failed")
    with FileLock(path.with_suffix(".lock"), timeout=SECONDS):
        if path.exists():
            return
        if failed.exists():
            raise NotCompiled(f"{failed.read_text()} (remove {failed} to try again)")
        unfinished = path.with_suffix(f".{os.getpid()}")
        words = [*shlex.split(command), *flags.split(), str(source), "-o", str(unfinished)]
        try:
            subprocess.run(words, capture_output=True, text=True, check=True, timeout=SECONDS)
            if "-shared" in flags:
                ctypes.CDLL(str(unfinished))
            unfinished.replace(path)
        except (OSError, subprocess.SubprocessError) as failure:
            complaint = getattr(failure, "stderr", None) or str(failure)
            failed.write_text(f"{shlex.join(words[:-1])}: {complaint.strip()[:500]}")
            raise NotCompiled(failed.read_text()) from failure
        finally:
            unfinished.unlink(missing_ok=True)
