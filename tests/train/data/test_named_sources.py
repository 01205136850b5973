"""The text of the standard library and of installed packages:
what is in it, and what is left out.
"""

from collections import Counter
from pathlib import Path

import pytest

from delta_trn.train.data.sources import FileSource, find_source, named_source
from delta_trn.train.settings.errors import SourceError
from delta_trn.train.settings.schema import DataSection


def test_the_standard_library_is_megabytes_of_source_without_tests_and_tables():
    source = named_source("python-stdlib")
    assert source.names == tuple(sorted(source.names)) and len(source.names) > 300
    assert sum((source.root / name).stat().st_size for name in source.names) > 5e6
    parts = {part for name in source.names for part in Path(name).parts}
    assert not parts & {"test", "tests", "site-packages", "encodings", "__pycache__"}
    assert {"argparse.py", "json", "asyncio"} <= parts
    assert not any("_sysconfigdata" in name for name in source.names)
    assert source.settings() == named_source("python-stdlib").settings()


def test_site_packages_are_the_modules_of_installed_packages_in_order(tmp_path, monkeypatch):
    mine = [f"a/m{n:03d}.py" for n in range(120)]
    others = [
        "c/data.txt",
        "c/__pycache__/m.py",
        "c/.hidden/m.py",
        "delta_trn/m.py",
        "__editable___d.py",
    ]
    for name in mine + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "m000.py").write_bytes("# déjà vu, not in UTF-8\n".encode("latin-1"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    source = find_source(DataSection(source="site-packages"))
    assert isinstance(source, FileSource)
    skipped: Counter[str] = Counter()
    assert list(source.documents(skipped)) == mine[1:]
    assert skipped == {"files that are not text in UTF-8": 1}
    (tmp_path / "a" / "new.py").write_text("new")
    assert source.settings() != named_source("site-packages").settings()


@pytest.mark.parametrize("name", ["python-stdlib", "site-packages"])
def test_an_installation_without_source_files_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(
        "sysconfig.get_paths", lambda: dict.fromkeys(("stdlib", "purelib"), str(tmp_path))
    )
    with pytest.raises(SourceError, match=r"0 source files .* pass a folder of text"):
        named_source(name)
