"""The text of the standard library and of installed packages: what is in it, and what is left out."""

from collections import Counter
from pathlib import Path

import pytest

from delta_trn.train.data.holdout import HoldOut
from delta_trn.train.data.sources import find_source, python_stdlib, site_packages
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection


def test_the_standard_library_is_megabytes_of_source_without_tests_and_tables():
    source = python_stdlib()
    assert source.names == tuple(sorted(source.names)) and len(source.names) > 300
    assert sum((source.root / name).stat().st_size for name in source.names) > 5e6
    parts = {part for name in source.names for part in Path(name).parts}
    assert not parts & {"test", "tests", "site-packages", "encodings", "__pycache__"}
    assert {"argparse.py", "json", "asyncio"} <= parts
    assert not any("_sysconfigdata" in name for name in source.names)
    assert source.settings() == python_stdlib().settings()


def test_a_standard_library_without_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("delta_trn.train.data.sources.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(SourceError, match=r"0 source files .* pass a folder of text"):
        python_stdlib()


def module(topic: str) -> str:
    return "".join(f"{topic}_{n} = compute_the_value_of({topic!r}, {n})\n" for n in range(20))


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A standard library of 120 modules, and packages beside it; returns the packages' folder."""
    library, folder = tmp_path / "python", tmp_path / "python" / "site-packages"
    for n in range(120):
        (library / f"part{n % 3}").mkdir(parents=True, exist_ok=True)
        (library / f"part{n % 3}" / f"m{n}.py").write_text(module(f"library_{n}"))
    files = {
        "b/own.py": module("own"),
        "a/first.py": module("first"),
        "a/tests/case.py": module("case"),
        "c/copy_of_first.py": module("first"),
        "c/empty.py": "",
        "c/vendored.py": module("library_7"),
        "c/changed.py": module("library_8").replace("8, 1", "8, 999")
        + "one_more_line = of_this_package_alone()\n",
        "c/uses_some.py": module("library_9")[:200] + module("uses"),
        "c/data.txt": "no module",
        "c/__pycache__/cached.py": module("cached"),
        "c/.hidden/hidden.py": module("hidden"),
        "delta_trn/models.py": module("ours"),
        "delta_trn-0.1.dist-info/made.py": module("made"),
        "__editable___delta_trn_finder.py": module("finder"),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "b" / "latin1.py").write_bytes("# déjà vu, not in UTF-8\n".encode("latin-1"))
    paths = {"stdlib": str(library), "purelib": str(folder), "platlib": str(folder)}
    monkeypatch.setattr("delta_trn.train.data.sources.sysconfig.get_paths", lambda: paths)
    return folder


def test_site_packages_are_the_modules_of_installed_packages_each_once_and_in_order(packages):
    source = find_source(DataSection(source="site-packages"))
    assert source.names == (
        "a/first.py", "a/tests/case.py", "b/latin1.py", "b/own.py", "c/uses_some.py"
    )  # fmt: skip
    skipped: Counter[str] = Counter()
    texts = [(packages / name).read_text() for name in source.names if "latin1" not in name]
    assert list(source.documents(skipped)) == texts
    assert skipped == {
        "copies of other files, or empty": 2,
        "copies of the standard library's files": 2,
        "files that are not UTF-8": 1,
    }
    assert source.settings() == find_source(DataSection(source="site-packages")).settings()
    (packages / "a" / "new.py").write_text(module("new"))
    assert source.settings() != find_source(DataSection(source="site-packages")).settings()


def test_no_file_that_the_standard_library_holds_out_is_in_site_packages(packages):
    held_out = HoldOut(0, 0.05, python_stdlib(), None, None)
    texts = [x for x in python_stdlib().documents(Counter()) if held_out.split_of(x) == "val"]
    before = site_packages().names
    for n, text in enumerate(texts):
        (packages / "c" / f"copy{n}.py").write_text(text)
        (packages / "c" / f"changed{n}.py").write_text("# adapted\n" + text.replace(" = ", "  = ", 3))
    assert texts and site_packages().names == before


def test_an_installation_without_packages_is_refused(packages):
    for path in packages.rglob("*.py"):
        path.unlink()
    with pytest.raises(SourceError, match="holds no source file of a package; pass a folder of text"):
        site_packages()
