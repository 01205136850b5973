"""The file beside a compiler's cache that says what was compiled into it: one entry an identity."""

import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from delta_trn.backends.machine import ProgramCache
from delta_trn.train.files import hold_folder, write_file
from delta_trn.train.neuron.identity import Identity
from delta_trn.train.settings.errors import TrainError

FORMAT = 1
NAME = "delta-trn-warmup.json"
# Entries of code that is long changed are of no use to anybody.
KEPT = 100


@dataclass(frozen=True)
class Compiled:
    """One graph, compiled or found in the cache: `programs` that were not there before, and their keys."""

    name: str
    inputs: tuple[tuple[int | None, ...], ...]
    programs: int
    seconds: float
    keys: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        tokens = [{"shape": list(shape), "dtype": "int64"} for shape in self.inputs]
        return {**asdict(self), "inputs": tokens, "seconds": round(self.seconds, 3)}


def place(caches: tuple[ProgramCache, ...]) -> Path:
    """The manifest of these caches: in the leading one, or if that is no folder, in the user's own cache.

    s3 is read and written by the compiler alone; its manifest is then this machine's.
    """
    if caches and "://" not in caches[0].place:
        return Path(caches[0].place) / NAME
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) / "delta-trn" / NAME


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Entry by fingerprint; none where there is no manifest. TrainError for one that cannot be read."""
    try:
        tree = json.loads(path.read_bytes())
        if tree["format"] != FORMAT:
            raise TrainError(
                f"{path} has format {tree['format']}, expected {FORMAT}; delete it: warming again is "
                "quick where the cache has everything"
            )
        entries = tree["entries"]
        if not all(isinstance(entry, dict) for entry in entries.values()):
            raise TypeError("an entry is no object")
        return entries
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete it: warming again is quick "
            "where the cache has everything"
        ) from None


def record(path: Path, identity: Identity, compiled: list[Compiled]) -> None:
    """Add the entry of `identity`, or replace it. Others' stay, also those that are being added meanwhile."""
    entry = {
        **asdict(identity),
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "graphs": [graph.as_dict() for graph in compiled],
    }
    with hold_folder(path.parent):
        entries = {**read(path), identity.fingerprint(): entry}
        newest = sorted(entries, key=lambda name: entries[name].get("made", ""))[-KEPT:]
        _write(path, {name: entries[name] for name in newest})


def nearest(entries: dict[str, dict[str, Any]], identity: Identity) -> list[str]:
    """Names of what differs from the entry that is most like `identity`; none if there is no entry."""
    return min((identity.differences(entry) for entry in entries.values()), key=len, default=[])


def _write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    write_file(path, json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n")
