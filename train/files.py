"""Files that are whole or absent, disk errors that say what to do, and locks on folders.

A folder may come from somebody else, in an archive or on a shared disk, and a link in it may lead
to any file of ours. So every file that is kept is written here. A new one gets a random name and is
opened only if nothing has that name. One that is appended to, or is read to be written again, must
be a plain file with one name.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from delta_trn.train.settings.errors import DiskFull, NotAPlainFile

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
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
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
def replace_file(path: Path, advice: str = ADVICE) -> Iterator[BinaryIO]:
    """Yields a file to write to, and renames it to `path` once it is on the disk.

    After an error, `path` is as it was and nothing lies beside it. What a killed process leaves
    beside it, the next call for this path removes.
    """
    with disk_errors(path, advice):
        _remove_leftovers(path)
        file, beside = _new_beside(path)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(beside, path)  # a link that lies there is replaced, not followed
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(beside)
            if isinstance(error, IsADirectoryError):
                raise NotAPlainFile(
                    _not_plain(path, "a folder", "a file is written there")
                ) from error
            raise
        sync(path.parent)


def write_file(path: Path, content: bytes | str, advice: str = ADVICE) -> None:
    """Replaces a file by the content, or leaves it as it was."""
    with replace_file(path, advice) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _new_beside(path: Path) -> tuple[BinaryIO, Path]:
    """Returns a new file beside `path`, which is locked as long as it is open, and its place.

    O_EXCL follows no link, and refuses whatever has the name already.
    """
    while True:
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        with suppress(FileExistsError):
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
            with suppress(OSError):  # a file system without locks: nobody removes what lies there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return open(descriptor, "wb"), beside
            os.close(descriptor)  # another process took it for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes left of `_new_beside`: files that no process locks."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for name in filter(ours.fullmatch, os.listdir(path.parent)):
        beside = path.with_name(name)
        with suppress(OSError):
            descriptor = os.open(beside, os.O_RDWR | _NO_LINK | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.unlink(beside)
            finally:
                os.close(descriptor)


def require_plain(path: Path, use: str = "this program writes to it") -> bool:
    """Returns whether there is a file at `path`.

    Raises NotAPlainFile if that is a link, a pipe, a folder, or a file that has a second name.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "no plain file")
        raise NotAPlainFile(_not_plain(path, kind, use))
    if found.st_nlink > 1:
        raise NotAPlainFile(
            _not_plain(path, f"a file with {found.st_nlink} names (hard links)", use)
        )
    return True


def require_own_folder(path: Path, use: str = "this program writes into it") -> None:
    """Raises NotAPlainFile if what lies at `path` is not a folder, or is a link to one."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a symbolic link" if path.is_symlink() else "no folder"
        raise NotAPlainFile(
            f"{path} is {kind}, and {use}: in a folder from somebody else it could lead to any "
            "files of yours; put the folder itself there, or link to the folder around it"
        )


def _not_plain(path: Path, kind: str, use: str) -> str:
    return (
        f"{path} is {kind}, and {use}: in a folder from somebody else it could lead to any file "
        "of yours; remove it, or put a copy of the file in its place"
    )


def open_plain(path: Path, mode: str) -> BinaryIO:
    """Opens a plain file to append to it or to change it, made anew where there is none.

    mode    "ab", "a+b" or "r+b"

    Raises NotAPlainFile for anything else that lies there.
    """
    require_plain(path)

    def open_itself(name: str, flags: int) -> int:
        return os.open(name, flags | _NO_LINK, 0o666)

    return open(path, mode, opener=open_itself)  # type: ignore[return-value]


def read_plain(path: Path) -> str:
    """Returns the text of a plain file, and "" where there is none. Raises NotAPlainFile."""
    return path.read_text(encoding="utf-8", errors="replace") if require_plain(path) else ""


def remove(path: Path) -> None:
    """Removes a file, a link or a whole folder, as far as it can; nothing that a link leads to."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def make_fresh_folder(path: Path) -> None:
    """Makes an empty folder in the place of what a killed process has left there.

    Raises NotAPlainFile where something lies there that this process may not remove.
    """
    remove(path)
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise NotAPlainFile(
            f"{path} is there and cannot be removed, and this program makes a folder of that name; "
            "remove it"
        ) from error


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
            # its holder took the empty folder away; make it again
            with suppress(FileNotFoundError):
                _acquire(lock, folder, refuse)
    try:
        write_file(holder, f"{os.getpid()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        if is_new and os.listdir(folder) == [".lock"]:  # a mistyped name leaves no folder behind
            (folder / ".lock").unlink()
            with suppress(OSError):  # whoever waits may have made its own lock file there just now
                folder.rmdir()
        lock.release()


def _acquire(lock: FileLock, folder: Path, refuse: Callable[[str], Exception] | None) -> None:
    require_plain(folder / ".lock", "processes lock it")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = folder / HOLDER
        pid = read_plain(holder).strip() or "unknown"
        if refuse is not None:
            raise refuse(pid) from None
        print(f"waiting for the process that holds {folder} (pid {pid})", file=sys.stderr)
        lock.acquire()
