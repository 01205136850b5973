"""What is compiled for this CPU: what is remembered, what is loaded, and what is said."""

import os
import shlex
import stat
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from delta_trn.backends import compiler, gated_delta_rule
from delta_trn.backends.__main__ import main
from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.layers import cpu_kernel
from tests.support.forked import call_apart
from tests.support.planted_bugs import Bug, planted

HEAD = "kernel.cpp:3:5: error: expected ';'"
needs_kernel = pytest.mark.skipif(
    chunked_kernel.library(False).functions is None, reason=chunked_kernel.library(False).note
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Gives compiled files an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    return tmp_path / "caches" / "delta-trn"


@pytest.fixture
def source(tmp_path):
    """A library of one function, answer()."""
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Makes a compiler of a shell's line: it answers --version, and does the line otherwise."""

    def use(line):
        path = tmp_path / "a compiler"
        calls = shlex.quote(str(tmp_path / "calls"))
        path.write_text(
            f"#!/bin/sh\n[ $# = 1 ] && echo version 1 && exit 0\necho . >> {calls}\n{line}\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", shlex.quote(str(path)))

    return use


def calls(tmp_path):
    return (tmp_path / "calls").read_text().count(".")


def answer(source):
    library = compiler.load(source)
    assert library.functions is not None, library.note
    return library.functions.answer()


class TestAFailure:
    @pytest.mark.parametrize(
        "complaint",
        [
            HEAD,
            "/usr/include/x.h:1:10: fatal error: omp.h: No such file or directory",
            "g++: error: unrecognized command-line option '-fno-such'",
            "clang: error: unknown argument: '-fno-such'",
            "cc1plus: error: bad value ('none') for '-march=' switch",
        ],
    )
    def test_of_the_source_or_a_flag_is_not_tried_again(
        self, complaint, cache, source, tmp_path, use
    ):
        use(f"printf '%s\\n' {shlex.quote(complaint)} >&2; exit 1")
        for _ in range(2):
            library = compiler.load(source)
            assert library.functions is None and complaint in library.note, library.note
            assert ".failed to try again" in library.note, "the first time, too"
        assert calls(tmp_path) == 1

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("kill -9 $$", "signal 9 ended it"),
            (f'echo "{HEAD}" >&2; exit 4', "ended with status 4"),
            ("exit 1", "no word"),
            ("exit 0", "No such file"),
            ("exec sleep 9", "timed out after 0.3"),
            (
                "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
                "Killed signal",
            ),
            (
                "echo 'one.cpp:9:1: fatal error: error writing to /tmp/x.s: No space left on device' >&2"
                "; exit 1",
                "No space left",
            ),
            ("echo 'one.cpp:9:1: internal compiler error: oops' >&2; exit 1", "internal compiler"),
            ("echo 'as: cannot create temporary file' >&2; exit 1", "temporary file"),
        ],
    )
    def test_that_passes_is_tried_again(
        self, line, reason, cache, source, tmp_path, use, monkeypatch
    ):
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "SECONDS", 0.3 if "sleep" in line else 60)
            use(line)
            library = compiler.load(source)
            assert library.functions is None and reason in library.note, library.note
            assert "to try again" not in library.note
        compiler.load(source)
        assert calls(tmp_path) == 2
        assert {path.suffix for path in cache.iterdir()} <= {".lock"}

    @needs_kernel
    def test_of_a_full_folder_for_temporary_files_leaves_the_next_process_its_kernel(
        self, cache, source, tmp_path, monkeypatch
    ):
        killer = tmp_path / "killed"
        killer.write_text(
            "#!/bin/sh\n[ $# = 1 ] && exec g++ --version\n"
            '[ -e "$0.good" ] && exec g++ "$@"\ntouch "$0.good"\n'
            "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1\n"
        )
        killer.chmod(0o755)
        monkeypatch.setenv("CXX", str(killer))
        for said in ("Killed signal", "a C++ kernel"):
            (note,) = call_apart(lambda: compiler.load(source).note)
            assert said in note

    def test_is_named_by_the_end_of_what_the_compiler_says(self, cache, source, use):
        use(
            'for i in $(seq 200); do echo "one.cpp:$i:1: warning: nothing to see" >&2; done; '
            f'echo "{HEAD}" >&2; exit 1'
        )
        library = compiler.load(source)
        assert HEAD in library.note and len(library.note) < 1500


@needs_kernel
class TestAFile:
    @pytest.mark.parametrize("content", [b"", b"\x7fELF", None], ids=["empty", "short", "half"])
    def test_that_was_cut_short_is_compiled_again(self, content, cache, source):
        assert answer(source) == 42
        (path,) = cache.glob("*.so")
        whole = path.read_bytes()
        path.unlink()  # this process has it open: a child must load what lies there now
        path.write_bytes(whole[: len(whole) // 2] if content is None else content)
        path.chmod(0o700)
        assert answer(source) == 42
        assert len(path.read_bytes()) == len(whole)

    def test_is_on_the_disk_before_it_has_its_name(self, cache, source, monkeypatch):
        synced = []
        fsync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda x: synced.append(os.readlink(f"/proc/self/fd/{x}")) or fsync(x)
        )
        assert answer(source) == 42
        kinds = [name.rpartition(".")[2] for name in synced]
        assert kinds == ["sha256", str(os.getpid())]

    @pytest.mark.parametrize("how", ["owner", "others may write", "link"])
    def test_that_somebody_else_may_have_written_is_not_loaded(
        self, how, cache, source, tmp_path, monkeypatch
    ):
        evil = tmp_path / "evil.cpp"
        evil.write_text('extern "C" int answer() { return 13; }\n')
        assert answer(source) == 42
        (path,) = cache.glob("*.so")
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "evil"))
            built, _ = compiler.build(evil)
        path.unlink()
        path.write_bytes(built.read_bytes())
        path.with_suffix(".sha256").write_text(built.with_suffix(".sha256").read_text())
        path.chmod(0o777 if how == "others may write" else 0o700)
        if how == "link":
            path.unlink()
            path.symlink_to(built)
        lstat = os.lstat

        def of_another(place):
            found = lstat(place)
            if how != "owner" or found.st_ino != theirs:
                return found
            return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))

        theirs = path.lstat().st_ino
        monkeypatch.setattr(os, "lstat", of_another)
        assert answer(source) == 42
        # dlopen gives one who has loaded a name before what it was then, so the file is looked at
        assert path.read_bytes() != built.read_bytes() and not path.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def test_lies_where_nobody_else_may_write(self, cache, source):
        cache.mkdir(parents=True)
        cache.chmod(0o777)
        assert answer(source) == 42
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        (path,) = cache.glob("*.so")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def test_lies_elsewhere_where_the_folder_is_another_users(self, cache, source, monkeypatch):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(compiler, "_is_ours", lambda path: path.exists())
        assert answer(source) == 42
        assert not list(cache.iterdir())


class TestWithoutACompilerOrAHome:
    @pytest.mark.parametrize(
        ("command", "reason"),
        [
            (" ", "CXX=' ' names no compiler"),
            ('g++ "', "is no command (No closing quotation)"),
            ("no-such-compiler", "there is no no-such-compiler"),
        ],
    )
    def test_odd_commands_are_refused_in_words(self, command, reason, cache, source, monkeypatch):
        monkeypatch.setenv("CXX", command)
        library = compiler.load(source)
        assert library.functions is None and reason in library.note and library.is_missed

    @needs_kernel
    def test_there_is_a_folder_of_this_process_alone(self, cache, source, monkeypatch):
        def nobody():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", nobody)
        assert answer(source) == 42

    def test_the_operation_warns_once_and_says_why(self, cache, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler")
        monkeypatch.setattr(compiler, "_told", set())
        for kernel in (chunked_kernel, cpu_kernel):
            kernel.library.cache_clear()
        x = torch.ones(1, 4, 1, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                gated_delta_rule(x, x, x, -x[..., 0], x[..., 0])
        for kernel in (chunked_kernel, cpu_kernel):
            kernel.library.cache_clear()
        said = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(said) == 1 and "there is no no-such-compiler" in said[0]

    @pytest.mark.parametrize("how", ["asked for", "there"])
    def test_nothing_is_said_where_nothing_is_missed(self, how, cache, monkeypatch):
        if how == "asked for":
            monkeypatch.setenv(compiler.SWITCH, "0")
        library = compiler.load(Path(chunked_kernel.__file__)) if how == "asked for" else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiler.warn_once(library or compiler.Library(None, "PyTorch, as it should be"))

    def test_the_short_table_says_it(self, cache, monkeypatch, capsys):
        monkeypatch.setenv("CXX", "no-such-compiler")
        chunked_kernel.library.cache_clear()
        assert main([]) == 0
        chunked_kernel.library.cache_clear()
        words = " ".join(capsys.readouterr().out.split())
        assert "gated_delta_rule, " in words and "there is no no-such-compiler" in words


@needs_kernel
def test_our_kernels_compile_without_a_warning():
    command, _ = compiler._compiler()
    source = Path(chunked_kernel.__file__).with_suffix(".cpp")
    flags = compiler.FLAGS.replace("-O3", "-O0").split()
    words = [*command, *flags, "-fsyntax-only", str(source)]
    said = subprocess.run(words, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")


BUGS = (
    Bug("every failure is remembered", "backends.compiler:_refuse",
        "status == 1 and _AGAINST_SOURCE.search(said) and not _PASSING.search(said)", "True", ""),
    Bug("what passes is taken for the source's fault", "backends.compiler:_refuse",
        " and not _PASSING.search(said)", "", ""),
    Bug("the beginning is shown", "backends.compiler:_refuse",
        "said[-COMPLAINT:]", "said[:COMPLAINT]", ""),
    Bug("what is cut short is loaded", "backends.compiler:_is_whole",
        "digest.read_text(errors=\"replace\") == hashlib.sha256(path.read_bytes()).hexdigest()",
        "True", ""),
    Bug("whose file it is does not count", "backends.compiler:_is_ours",
        " and found.st_uid == os.geteuid() and not others_write", "", ""),
    Bug("the folder is others', too", "backends.compiler:_folder",
        "folder.chmod(0o700)", "pass", ""),
)  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_seen(bug, cache, source, tmp_path, use, monkeypatch):
    failure, file = TestAFailure(), TestAFile()
    full = "one.cpp:9:1: fatal error: error writing to x.s: No space left on device"
    checks = {
        "every": lambda: failure.test_that_passes_is_tried_again(
            "kill -9 $$", "signal 9", cache, source, tmp_path, use, monkeypatch
        ),
        "what passes": lambda: failure.test_that_passes_is_tried_again(
            f"echo '{full}' >&2; exit 1", "No space", cache, source, tmp_path, use, monkeypatch
        ),
        "the beginning": lambda: failure.test_is_named_by_the_end_of_what_the_compiler_says(
            cache, source, use
        ),
        "what is cut": lambda: file.test_that_was_cut_short_is_compiled_again(
            b"\x7fELF", cache, source
        ),
        "whose": lambda: file.test_that_somebody_else_may_have_written_is_not_loaded(
            "others may write", cache, source, tmp_path, monkeypatch
        ),
        "the folder": lambda: file.test_lies_where_nobody_else_may_write(cache, source),
    }
    (check,) = (check for name, check in checks.items() if bug.name.startswith(name))
    with planted(bug), pytest.raises(AssertionError):
        check()
