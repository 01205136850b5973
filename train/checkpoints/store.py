"""A folder of checkpoints, each whole or absent. Knows folders and hashes, not what is in them.

    step-00000100/     whole: renamed here after every file and manifest.json were synced
    .step-*.tmp/       being written, or left by a kill
    .step-*.old/       being removed
    best               symbolic link to the one with the lowest validation loss

manifest.json lists size and sha256 of every other file: truncation and bit rot are found before anything is
loaded, and not by a shape error, or by nothing at all. Several processes may fill one folder; each hashes
what it wrote, and the folder gets its name when all have said that theirs is on the disk.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from delta_trn.train.files import disk_errors, sha256_of, sync
from delta_trn.train.settings.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-\d+\.(tmp|old)")

T = TypeVar("T")
Described = dict[str, dict[str, Any]]


class Agreed(Protocol):
    """How processes do something together: see `Team.agreed`."""

    def __call__(self, work: Callable[[], T], /) -> list[T]: ...


def _alone(work: Callable[[], T], /) -> list[T]:
    return [work()]


class CheckpointStore:
    """The `checkpoints` folder of one run. One process at a time, or one team, may write to it."""

    def __init__(self, directory: Path):
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending. None was looked into."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        step: int,
        write: Callable[[Path], Iterable[Path] | None],
        *,
        agreed: Agreed = _alone,
        leads: bool = True,
    ) -> Path:
        """Have `write` fill a folder, and give it the step's name once it is on the disk.

        Of a team every process calls this, `write` returns the files that are its own (None: all there are),
        and what goes wrong on one is raised on all. DiskFull if there is no space: the half-written folder is
        removed, and all others are as they were.
        """
        final = self.path(step)
        beside = self.directory / f".{final.name}.tmp"
        whole = [f"step {other}" for other in self.steps() if other != step]
        safe = f"checkpoints already there are whole ({', '.join(whole) or 'none yet'})"
        todo = f"free some space and run `python -m train resume {self.directory.parent}`"
        with disk_errors(final, f"{safe}: {todo}"):
            try:
                agreed(lambda: self._begin(beside) if leads else None)
                parts = agreed(lambda: _on_disk(beside, write(beside)))
                agreed(lambda: self._finish(beside, final, parts) if leads else None)
            except BaseException:
                if leads:
                    shutil.rmtree(beside, ignore_errors=True)
                raise
        return final

    def _begin(self, beside: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        beside.mkdir()

    def _finish(self, beside: Path, final: Path, parts: list[Described]) -> None:
        files = {name: part[name] for part in parts for name in part}
        manifest = {"format": 1, "files": dict(sorted(files.items()))}
        (beside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        sync(beside / MANIFEST)
        sync(beside)
        if final.exists():
            # left from before a resume that began further back
            self._remove(final)
        os.rename(beside, final)
        sync(self.directory)

    def damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint's files, or None. Reads all of them."""
        folder = self.path(step)
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

    def require_whole(self, step: int) -> Path:
        """The step's folder. CheckpointError if it is missing or damaged, naming the others."""
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are: {known}")
        if damage := self.damage(step):
            others = ", ".join(str(other) for other in self.steps() if other != step) or "none"
            raise CheckpointError(f"checkpoint of step {step} is damaged: {damage}; other steps: {others}")
        return self.path(step)

    def newest_whole(self, tell: Callable[[str], None]) -> int | None:
        """The newest undamaged step, None where there are no checkpoints; `tell` hears of each damaged one.

        CheckpointError if there are some and all are damaged.
        """
        steps = self.steps()
        damages = []
        for step in reversed(steps):
            damage = self.damage(step)
            if damage is None:
                return step
            damages.append(damage)
            tell(f"checkpoint of step {step} is damaged: {damage}")
        if steps:
            raise CheckpointError(
                f"every checkpoint in {self.directory} is damaged: {damages[0]}; restore one from a backup, "
                "or move the folder away to begin at step 0"
            )
        return None

    def point_best(self, step: int) -> None:
        """Make `best` lead to this step's folder."""
        beside = self.directory / ".best.tmp"
        beside.unlink(missing_ok=True)
        beside.symlink_to(self.path(step).name, target_is_directory=True)
        os.replace(beside, self.directory / "best")
        sync(self.directory)

    def best(self) -> int | None:
        """The step that `best` leads to; None if it leads nowhere."""
        link = self.directory / "best"
        if not link.is_symlink():
            return None
        match = _NAME.fullmatch(os.path.basename(os.readlink(link)))
        return int(match[1]) if match and link.exists() else None

    def rotate(self, keep_last: int, keep: int | None) -> None:
        """Remove all but the newest `keep_last` and the step `keep`."""
        for step in self.steps()[:-keep_last]:
            if step != keep:
                self._remove(self.path(step))

    def set_aside(self, after: int) -> list[int]:
        """Rename checkpoints of later steps to undone-step-*, where only a person looks. Their steps."""
        later = [step for step in self.steps() if step > after]
        for step in later:
            away = self.directory / f"undone-{self.path(step).name}"
            shutil.rmtree(away, ignore_errors=True)
            os.rename(self.path(step), away)
        return later

    def _remove(self, folder: Path) -> None:
        # renamed first: a kill in the middle of removing must not leave a checkpoint that looks whole
        away = self.directory / f".{folder.name}.old"
        shutil.rmtree(away, ignore_errors=True)
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)


def _on_disk(folder: Path, mine: Iterable[Path] | None) -> Described:
    """Sync files, and say of each by name what the manifest will. None of one's own is not all there are."""
    found: Described = {}
    for path in folder.iterdir() if mine is None else mine:
        sync(path)
        found[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return found
