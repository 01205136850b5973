"""Files in folders that may come from somebody else, in an archive or on a shared disk.

A link that lies there may lead to any file of ours, and so may a link under the name of a temporary
file that can be foreseen. So every file is written under a new, random name, and then renamed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the place of a new, empty file beside `path`, and renames it to `path` at the end.

    A link that lies at `path` is replaced, and not followed. After an error `path` is as it was,
    and nothing lies beside it.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # O_EXCL follows no link, and refuses whatever has the name already
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(beside, flags, 0o666))
    try:
        yield beside
        os.replace(beside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces a file by the text, or leaves it as it was."""
    with replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")
