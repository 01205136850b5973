"""A folder of checkpoints, each whole or absent. It knows folders and hashes, not what is in them.

    step-00000100/     whole: renamed here after every file and manifest.json were synced
    .step-*.tmp/       being written, or left by a kill
    .step-*.old/       being removed
    undone-step-*/     of a run resumed further back; removed once the resumed run has saved its
                       first
    best               symbolic link to the one with the lowest validation loss, which is kept

manifest.json lists size and sha256 of every other file: truncation and bit rot are found before
anything is loaded. Several processes may fill one folder: each hashes what it wrote, and the folder
gets its name when all files are on the disk.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delta_trn.train.files import (
    disk_errors,
    make_fresh_folder,
    remove,
    require_own_folder,
    sha256_of,
    sync,
)
from delta_trn.train.settings.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d+\.(tmp|old)")

Described = dict[str, dict[str, Any]]


class CheckpointStore:
    """The `checkpoints` folder of one run. One process at a time, or one team, may write to it."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending, without looking into any."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def require_own(self) -> None:
        """Raises NotAPlainFile if the folder is a link, whose target a run would change."""
        require_own_folder(self.directory, "a run writes and removes checkpoints in it")

    def _beside(self, step: int) -> Path:
        return self.directory / f".{self.path(step).name}.tmp"

    @contextmanager
    def writing(self, step: int, *, leads: bool = True) -> Iterator[Path]:
        """Surrounds the writing of a checkpoint, and yields the folder to fill between `begin` and
        `finish`.

        Every process of a team enters it. After an error the half-written folder is removed and all
        others are as they were; DiskFull if there is no space.
        """
        whole = [f"step {other}" for other in self.steps() if other != step]
        safe = f"checkpoints already there are whole ({', '.join(whole) or 'none yet'})"
        todo = f"free some space and run `delta-trn resume {self.directory.parent}`"
        with disk_errors(self.path(step), f"{safe}: {todo}"):
            try:
                yield self._beside(step)
            except BaseException:
                if leads:
                    remove(self._beside(step))
                raise

    def begin(self, step: int) -> None:
        """Makes the folder to fill, and removes what a kill has left. One process calls it."""
        self.require_own()
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove(path)
        make_fresh_folder(self._beside(step))

    def finish(self, step: int, parts: Iterable[Described]) -> None:
        """Gives the filled folder its manifest and the step's name. One process calls it, after all
        others.

        parts   what `describe` returned on each process
        """
        beside, final = self._beside(step), self.path(step)
        files = {name: part[name] for part in parts for name in part}
        manifest = beside / MANIFEST
        manifest.write_text(
            json.dumps({"format": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n"
        )
        sync(manifest)
        sync(beside)
        if final.exists():
            # left from before a resume that began further back
            self._remove(final)
        os.rename(beside, final)
        sync(self.directory)

    def damage(self, step: int) -> str | None:
        """Returns what is wrong with a checkpoint's files, or None. Reads all of them."""
        return _damage(self.path(step))

    def identity(self, step: int) -> str:
        """Returns a hash of what a checkpoint consists of. CheckpointError if it is not there."""
        try:
            return sha256_of(self.path(step) / MANIFEST)
        except OSError as error:
            raise CheckpointError(
                f"{self.path(step)} cannot be read ({(error.strerror or str(error)).lower()}); "
                "give every process the same folder"
            ) from error

    def require_whole(self, step: int) -> Path:
        """Returns the step's folder. CheckpointError if it is missing or damaged,
        naming the others.
        """
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.directory}; there are: {known}"
            )
        return self._require_undamaged(self.path(step), step)

    def _require_undamaged(self, folder: Path, step: int) -> Path:
        if damage := _damage(folder):
            others = ", ".join(str(other) for other in self.steps() if other != step) or "none"
            raise CheckpointError(
                f"checkpoint of step {step} is damaged: {damage}; other steps: {others}"
            )
        return folder

    def newest_whole(self, tell: Callable[[str], None]) -> int | None:
        """Returns the newest undamaged step, None where there are none; `tell` hears of each
        damaged one.

        CheckpointError if there are some and all are damaged.
        """
        damages = []
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if damage is None:
                return step
            damages.append(damage)
            tell(f"checkpoint of step {step} is damaged: {damage}")
        if damages:
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged: {damages[0]}; restore one from "
                "a backup, or move the folder away to begin at step 0"
            )
        return None

    def point_best(self, step: int) -> None:
        """Makes `best` lead to this step, which `rotate` then keeps."""
        link = self.directory / ".best.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name, target_is_directory=True)
        os.replace(link, self.directory / "best")
        sync(self.directory)

    def best(self) -> int | None:
        """Returns the step that `best` leads to; None if it leads nowhere."""
        link = self.directory / "best"
        if not link.is_symlink():
            return None
        match = _NAME.fullmatch(os.path.basename(os.readlink(link)))
        return int(match[1]) if match and link.exists() else None

    def require_best(self) -> Path | None:
        """Returns the best checkpoint, None if there is none. CheckpointError if it is damaged."""
        step = self.best()
        if step is None:
            return None
        folder = (self.directory / "best").resolve()
        return self._require_undamaged(folder, step)

    def rotate(self, keep_last: int) -> None:
        """Removes all but the best and the newest `keep_last`, and what `set_aside` has renamed.

        It is called after a checkpoint was saved: a resumed run has then gone on, and what it undid
        is over.
        """
        best = self.best()
        for step in self.steps()[:-keep_last]:
            if step != best:
                self._remove(self.path(step))
        for path in self.directory.glob("undone-step-*"):
            remove(path)

    def set_aside(self, after: int) -> list[int]:
        """Renames checkpoints of later steps to undone-step-*, which nothing reads. Returns their
        steps.

        Until the resumed run has saved one of its own, they are the way back from a step chosen by
        mistake.
        """
        if (self.best() or 0) > after:
            (self.directory / "best").unlink()
        later = [step for step in self.steps() if step > after]
        for step in later:
            away = self.directory / f"undone-{self.path(step).name}"
            remove(away)
            os.rename(self.path(step), away)
        return later

    def _remove(self, folder: Path) -> None:
        # renamed first: a kill in the middle of removing must not leave a checkpoint that looks
        # whole
        away = self.directory / f".{folder.name}.old"
        remove(away)
        os.rename(folder, away)
        remove(away)


def _damage(folder: Path) -> str | None:
    """Returns what is wrong with the files that a folder's manifest lists, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        expected = {
            str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()
        }
    except FileNotFoundError:
        return f"{folder / MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder / MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, (size, sha256) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, expected {size}"
        if sha256_of(path) != sha256:
            return f"{path} was changed since it was written (sha256 differs)"
    return None


def describe(files: Iterable[Path]) -> Described:
    """Syncs files to the disk. Returns by name what the manifest has of each."""
    entries: Described = {}
    for path in files:
        # safetensors makes files that their owner alone may read; the umask shows in the new
        # folder's mode
        path.chmod(path.parent.stat().st_mode & 0o666)
        sync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return entries
