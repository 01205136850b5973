"""What a refusing disk says, in whichever exception it says it."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from delta_trn.train.settings.errors import DiskFull

# EFBIG is what a file-size limit (ulimit -f, some network mounts) says instead of ENOSPC.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_FORBIDDEN = frozenset((errno.EACCES, errno.EROFS, errno.EPERM))
# safetensors writes from Rust and raises its own class, whose text carries the number.
_RUST = re.compile(r"os error (\d+)")


def error_number(error: BaseException) -> int | None:
    """The errno of an OSError, or of one that safetensors wrapped."""
    if isinstance(error, OSError):
        return error.errno
    found = _RUST.search(str(error))
    return int(found[1]) if found else None


@contextmanager
def refusals(path: Path, what_is_safe: str) -> Iterator[None]:
    """Turn a full or forbidden disk into DiskFull, which says what is safe; let all else pass."""
    try:
        yield
    except Exception as error:
        number = error_number(error)
        if number is not None and number in _FULL:
            raise DiskFull(
                f"no space left to write {path} ({os.strerror(number).lower()}); {what_is_safe}"
            ) from error
        if number is not None and number in _FORBIDDEN:
            raise DiskFull(f"may not write {path} ({os.strerror(number).lower()}); {what_is_safe}") from error
        raise


def sync_file(path: Path) -> None:
    """Have a file's content on the disk; of a folder, its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
