"""Triton's cache: filled by all cores before a run, and by one process of a node while it runs."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from delta_trn.triton_kernels.compiling.driver import Record

# what forked processes compile: a kernel cannot travel between processes, but its number can
_given: Sequence[Record] = ()


def compile_record(record: Record) -> Any:
    """Compiles a kernel as its launch would, or takes it from Triton's cache."""
    form = GluonASTSource if record.function.is_gluon() else ASTSource
    source = form(record.function, record.signature, record.constants, record.attributes)
    return triton.compile(source, record.target, record.options)


def _compile_at(place: int) -> bool:
    """Compiles a record of `_given`; returns whether it was not in Triton's cache."""
    with counting() as compiled:
        compile_record(_given[place])
    return bool(compiled)


def fill(records: Sequence[Record], jobs: int | None = None) -> Iterator[tuple[Record, Any]]:
    """Compiles all kernels in `jobs` processes, one per core by default; yields each when done.

    With it comes whether it was compiled, or was in the cache; or the exception that says why it
    cannot be.
    """
    global _given
    _given = records
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(records)) or 1
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        work = {pool.submit(_compile_at, i): record for i, record in enumerate(records)}
        for done in as_completed(work):
            yield work[done], done.exception() or done.result()


@contextmanager
def counting() -> Iterator[list[str]]:
    """Within `with`, gives the names of the kernels that are compiled, not taken from the cache."""
    compiled: list[str] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = listen  # type: ignore[assignment]
    try:
        yield compiled
    finally:
        knobs.compilation.listener = before


@contextmanager
def compile_in_turns() -> Iterator[None]:
    """Within `with`, processes that share Triton's cache compile each kernel once: the first does,
    the others wait and find it there.

    A kernel's lock is an empty file in that cache. Its holder lets it go when the kernel is compiled,
    when it compiles another, or when it ends.
    """
    folder = Path(knobs.cache.dir)
    hooks = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    held = threading.local()

    def release(**given: Any) -> Any:
        if file := getattr(held, "file", None):
            file.close()
            held.file = None
        return hooks[1](**given) if given and hooks[1] else None

    def lock(*, key: str, fn: Any, **given: Any) -> Any:
        release()
        if hooks[0] and (answer := hooks[0](key=key, fn=fn, **given)):
            return answer
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()[:32]
        with suppress(OSError):  # a file system without locks: each compiles for itself
            folder.mkdir(parents=True, exist_ok=True)
            held.file = (folder / f"delta-trn-{name}.lock").open("w")
            fcntl.flock(held.file, fcntl.LOCK_EX)
        return None

    knobs.runtime.jit_cache_hook = lock  # type: ignore[assignment]
    knobs.runtime.jit_post_compile_hook = release  # type: ignore[assignment]
    try:
        yield
    finally:
        release()
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = hooks
