"""Files that are either whole or absent: write beside, sync, rename."""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from delta_trn.train.data.errors import WriteError

# EFBIG is what a file-size limit (ulimit -f, some network mounts) says instead of ENOSPC.
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk into a WriteError that names the file and the way on."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise WriteError(
                f"no space left to write {path} ({error.strerror}); what is complete stays valid: free some "
                "space and run the same command again, it continues where it stopped"
            ) from error
        if error.errno in {errno.EACCES, errno.EROFS, errno.EPERM}:
            raise WriteError(
                f"may not write {path} ({error.strerror}); choose a folder you can write to with --out DIR"
            ) from error
        raise


def sync_directory(directory: Path) -> None:
    """Make renames inside the directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace the file by the content, or leave it as it was."""
    beside = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        try:
            with open(beside, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory against other processes. The kernel lets go when the holder dies."""
    ours = not directory.exists()
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "a+")  # noqa: SIM115 - closed below, also when flock raises
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the process that is preparing {directory}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    except BaseException:
        if ours and os.listdir(directory) == [".lock"]:  # a name mistyped leaves no folder behind
            (directory / ".lock").unlink()
            directory.rmdir()
        raise
    finally:
        lock.close()
