"""Compiles C++ kernels for this CPU when they are first needed, and loads them.

A compiled file lies in ~/.cache/delta-trn (or under XDG_CACHE_HOME), under a hash of all that it
depends on: the sources, the command, the compiler's version and the CPU's instructions. Beside it
lies the hash of its own content, without which it is compiled again. Processes that need it at once
wait for one of them. What the compiler says against a source or a flag is written down, too, and
nothing is tried again until one of those changes; after any other failure the next process tries.
Whoever asks for a kernel computes in PyTorch where there is none, and warns of it once.

The folder and the files are ours alone: code that another user may write is never loaded.

    DELTA_TRN_CPU_KERNEL=0      compiles and loads nothing
    CXX                         the compiler, else g++, c++ or clang++
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from delta_trn.backends.machine import cpu_flags

SWITCH = "DELTA_TRN_CPU_KERNEL"
SECONDS = 120
FLAGS = (
    "-std=c++17 -O3 -march=native -fwrapv -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared "
    "-Wno-subobject-linkage"  # each kernel is one source: a type in it that others cannot see is meant
)
# What a compiler says against a source, which it names with the line, or against a flag. Everything
# else passes: a full disk, too little memory, a compiler that is killed, or that is being installed.
_AGAINST_SOURCE = re.compile(
    r"^[^\s:][^:\n]*:\d+(:\d+)?: (fatal )?error: "
    r"|error: (unrecognized|unknown|unsupported|invalid|bad value|unable to find) ",
    re.MULTILINE,
)
_PASSING = re.compile(
    r"No space left|[Qq]uota exceeded|[Kk]illed|[Tt]erminated|[Oo]ut of memory|[Cc]annot allocate"
    r"|Input/output error|Read-only file system|Permission denied|internal compiler error"
    r"|signal|error writing|[Cc]annot create temporary"
)
COMPLAINT = 500  # characters of it that are kept: its last ones


@dataclass(frozen=True)
class Library:
    """A compiled library, or None, and a sentence that says what it is or why there is none.

    is_missed   whether there should be one: nobody asked for PyTorch
    """

    functions: ctypes.CDLL | None
    note: str
    is_missed: bool = False


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
        why = f"PyTorch, since the C++ kernel could not be compiled or loaded: {reason}"
        return Library(None, why, is_missed=True)


def warn_once(library: Library) -> None:
    """Warns, once in a process, that PyTorch computes what a missed library should, and why."""
    if not library.is_missed or library.note in _told:
        return
    _told.add(library.note)
    warnings.warn(
        f"the delta rule and its layers are slower on this CPU than they could be: {library.note} "
        f"(`delta-trn backends` says it, too; {SWITCH}=0 asks for PyTorch and silences this)",
        RuntimeWarning,
        stacklevel=2,
    )


_told: set[str] = set()


def build(source: Path, headers: Sequence[Path] = (), flags: str | None = None) -> tuple[Path, str]:
    """Returns `source` compiled, now or before, and the compiler's version.

    flags   None: those of a library

    Raises NotCompiled, OSError, subprocess.SubprocessError, or filelock's Timeout.
    """
    flags = FLAGS if flags is None else flags
    command, version = _compiler()
    path = _folder() / f"{source.stem}-{_key([source, *headers], [*command, flags, version])}.so"
    if not _is_whole(path):
        _compile_once(command, source, path, flags)
    return path, version


def _compiler() -> tuple[list[str], str]:
    """Returns the compiler's command in words, and the first line of its version."""
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "c++", "clang++"]
    try:
        commands = [shlex.split(name) for name in names]
    except ValueError as error:
        raise NotCompiled(f"CXX={named!r} is no command ({error}); name a C++ compiler") from error
    if not all(commands):
        raise NotCompiled(f"CXX={named!r} names no compiler; name one, or unset CXX")
    command = next((words for words in commands if shutil.which(words[0])), None)
    if command is None:
        raise NotCompiled(
            f"there is no {' and no '.join(names)}; install a C++ compiler, or name one in CXX"
        )
    answer = subprocess.run(
        [*command, "--version"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        timeout=SECONDS,
    )
    return command, answer.stdout.partition("\n")[0]


def _folder() -> Path:
    """Returns the folder of compiled files, which is this user's alone.

    One for this process alone, where there is no home, or the folder cannot be written, or somebody
    else owns it.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "delta-trn")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                folder.chmod(0o700)  # of an earlier version: others could put files here until now
            with tempfile.TemporaryFile(dir=folder):
                return folder
    except (OSError, RuntimeError):  # RuntimeError: nobody knows this user's home
        pass
    folder = Path(tempfile.mkdtemp(prefix="delta-trn-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_whole(path: Path) -> bool:
    """Returns whether a compiled file is as it was compiled, and nobody else's.

    What a power cut leaves has another hash, and a file that others own or may write is not read.
    """
    digest = _digest_of(path)
    if not (_is_ours(path) and _is_ours(digest)):
        return False
    return digest.read_text(errors="replace") == hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_ours(path: Path) -> bool:
    """Returns whether a plain file lies there that this user owns, and that no other may write."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not others_write


def _key(files: Sequence[Path], words: Sequence[str]) -> str:
    parts = [
        *(file.read_bytes() for file in files),
        *map(str.encode, [*words, *sorted(cpu_flags())]),
    ]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


def _compile_once(command: Sequence[str], source: Path, path: Path, flags: str) -> None:
    """Compiles to `path` unless another process does, or the source or a flag was refused before."""
    failed = path.with_suffix(".failed")
    with FileLock(path.with_suffix(".lock"), timeout=SECONDS):
        if _is_whole(path):
            return
        if _is_ours(failed):
            raise NotCompiled(f"{failed.read_text()} (remove {failed} to try again)")
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.unlink(missing_ok=True)
        words = [*command, *flags.split(), str(source), "-o", str(unfinished)]
        try:
            done = subprocess.run(
                words, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
            )
            if done.returncode != 0:
                _refuse(done, failed)
            if "-shared" in flags:
                ctypes.CDLL(str(unfinished))
            unfinished.chmod(0o700)
            _write(_digest_of(path), hashlib.sha256(unfinished.read_bytes()).hexdigest())
            _sync(unfinished)
            unfinished.replace(path)
        except (OSError, subprocess.SubprocessError) as failure:
            raise NotCompiled(f"{shlex.join(words[:-1])}: {failure}") from failure
        finally:
            unfinished.unlink(missing_ok=True)


def _refuse(done: subprocess.CompletedProcess[str], failed: Path) -> NoReturn:
    """Raises NotCompiled with the end of what the compiler said.

    Writes it down only if the same would be said the next time.
    """
    status, said = done.returncode, done.stderr.strip()
    how = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
    end = said if len(said) <= COMPLAINT else f"... {said[-COMPLAINT:]}"
    complaint = f"{shlex.join(done.args[:-1])}: {end or 'no word'} ({how})"
    if status == 1 and _AGAINST_SOURCE.search(said) and not _PASSING.search(said):
        _write(failed, complaint)
        complaint += f" (remove {failed} to try again)"
    raise NotCompiled(complaint)


def _write(path: Path, content: str) -> None:
    """Writes a file of this user's alone, and not through a link."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
