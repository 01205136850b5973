"""Files that are whole or absent, disk errors that say what to do, and locks on folders."""

import errno
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from delta_trn.train.settings.errors import DiskFull

HOLDER = ".lock.pid"  # the process that holds a folder
ADVICE = (
    "what is there is whole: free some space or choose another folder, and run the same command "
    "again"
)

FORBIDDEN = "may not write"
# EFBIG is what a file-size limit (ulimit -f, some network mounts) says instead of ENOSPC.
_PROBLEMS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "no space left to write"),
    **dict.fromkeys((errno.EACCES, errno.EROFS, errno.EPERM), FORBIDDEN),
}
# safetensors writes from Rust and raises its own class, whose text carries the number.
_RUST = re.compile(r"os error (\d+)")


@contextmanager
def disk_errors(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Maps full-disk and permission errors to DiskFull, which names the file and the advice."""
    try:
        yield
    except Exception as error:
        wrapped = _RUST.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(wrapped[1]) if wrapped else None
        if number is None or number not in _PROBLEMS:
            raise
        if _PROBLEMS[number] == FORBIDDEN:
            advice = advice.replace("free some space", "get write permission")
        raise DiskFull(
            f"{_PROBLEMS[number]} {path} ({os.strerror(number).lower()}); {advice}"
        ) from error


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Returns the hash of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def replace_file(path: Path, advice: str = ADVICE) -> Iterator[Path]:
    """Yields a path to write to, and renames that file to `path` once it is on the disk.

    After an error, `path` is as it was and nothing lies beside it.
    """
    beside = path.with_name(f".{path.name}.tmp")
    with disk_errors(path, advice):
        try:
            yield beside
            sync(beside)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_file(path: Path, content: bytes | str, advice: str = ADVICE) -> None:
    """Replaces a file by the content, or leaves it as it was."""
    with replace_file(path, advice) as beside:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def hold_folder(folder: Path, refuse: Callable[[str], Exception] | None = None) -> Iterator[None]:
    """Makes a folder and holds it against other processes. The kernel releases it when the holder
    dies.

    If another process holds it, raises what `refuse` returns for that process's id; without
    `refuse`, waits.
    """
    is_new = not folder.exists()
    lock, holder = FileLock(folder / ".lock"), folder / HOLDER
    with disk_errors(folder):
        while not lock.is_locked:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(
                FileNotFoundError
            ):  # its holder took the empty folder away; make it again
                _acquire(lock, folder, refuse)
    try:
        with disk_errors(folder):
            holder.write_text(f"{os.getpid()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        if is_new and os.listdir(folder) == [".lock"]:  # a mistyped name leaves no folder behind
            (folder / ".lock").unlink()
            with suppress(OSError):  # whoever waits may have made its own lock file there just now
                folder.rmdir()
        lock.release()


def _acquire(lock: FileLock, folder: Path, refuse: Callable[[str], Exception] | None) -> None:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = folder / HOLDER
        pid = holder.read_text().strip() if holder.exists() else "unknown"
        if refuse is not None:
            raise refuse(pid) from None
        print(f"waiting for the process that holds {folder} (pid {pid})", file=sys.stderr)
        lock.acquire()
