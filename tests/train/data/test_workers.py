"""Several processes write the bytes that one writes, whatever is interrupted, and leave no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from delta_trn.train.data import preparation, workers
from delta_trn.train.settings.errors import DataError
from tests.support.corpus import prepare_text, write_jsonl


def texts(count: int = 400) -> list[str]:
    return [f"{i} " * (i % 7) + "é\n" * (i % 3) for i in range(count)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("workers") / "corpus.jsonl", texts())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def alone(source, tmp_path_factory) -> dict[str, bytes]:
    return files(prepare_text(source, tmp_path_factory.mktemp("alone") / "out", shard_tokens=500))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_DOCUMENTS", 16)
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0.0)


def test_any_number_of_workers_writes_the_same_bytes(source, alone, tmp_path):
    assert files(prepare_text(source, tmp_path / "out", workers=3, shard_tokens=500)) == alone
    limited = [files(prepare_text(source, tmp_path / str(n), workers=n, max_tokens=700)) for n in (1, 2)]
    assert limited[0] == limited[1] and limited[0] != alone


SCRIPT = """
import sys
from delta_trn.train.data import preparation
from tests.support.corpus import prepare_text
preparation.BATCH_DOCUMENTS, preparation.COMMIT_SECONDS = 8, 0.0
prepare_text(sys.argv[1], sys.argv[2], workers=2, shard_tokens=500)
"""


def children(pid: int) -> list[int]:
    found = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for some in found for child in some]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it looks for processes in /proc")
def test_a_killed_preparation_leaves_no_worker_and_goes_on_with_another_number(source, alone, tmp_path):
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(source), str(out)], env=environment)
    while process.poll() is None and '"documents": 0' in (_read(out / "progress.json") or '"documents": 0'):
        time.sleep(0.001)
    left = children(process.pid) if process.poll() is None else []
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=200)
    assert left, "it was killed while workers were at work"
    until = time.monotonic() + 30
    while any(_is_running(pid) for pid in left):
        assert time.monotonic() < until, "a worker outlives the process that started it"
        time.sleep(0.05)
    assert not (out / "meta.json").exists()
    assert files(prepare_text(source, out, workers=1, shard_tokens=500)) == alone


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_running(pid: int) -> bool:
    status = _read(Path(f"/proc/{pid}/stat"))
    return bool(status) and status.rpartition(")")[2].split()[0] != "Z"


class Dying:
    """An encoder whose process ends at a certain text, as one does that the system kills."""

    def __call__(self, documents: list[str]) -> list[str]:
        if "end" in documents:
            os._exit(9)
        if "raise" in documents:
            raise DataError("a tokenizer's own error")
        return documents


@pytest.mark.parametrize(
    ("text", "message"), [("end", r"a worker process ended by itself.*it continues"), ("raise", "own error")]
)
def test_what_goes_wrong_in_a_worker_is_raised_after_the_batches_before_it(text, message):
    batches = [([word], number) for number, word in enumerate(["a", "b", text, "c"])]
    results = workers.encoded(Dying(), batches, 2)  # type: ignore[arg-type]
    assert [next(results), next(results)] == [(["a"], 0), (["b"], 1)]
    with pytest.raises(DataError, match=message):
        next(results)


def test_an_error_in_reading_is_raised_after_the_batches_that_were_read():
    def batches():
        yield ["a"], 0
        yield ["b"], 1
        raise OSError("the network went away")

    results = workers.encoded(Dying(), batches(), 2)  # type: ignore[arg-type]
    assert [next(results), next(results)] == [(["a"], 0), (["b"], 1)]
    with pytest.raises(OSError, match="network went away"):
        next(results)
