"""Links in a folder that came from somebody else lead no write of ours elsewhere."""

import os

import pytest
import torch

from delta_trn import complete_weights, save_model
from delta_trn.models.ecosystem.files import replaced
from delta_trn.models.ecosystem.untouched import cast_weights
from tests.support.families import make, write_whole
from tests.support.tiny_models import model

PRECIOUS = "precious"
NAMES = (
    *("model.tmp", "model.safetensors.index.json", "config.json"),
    *("README.md", "preprocessor_config.json", "modeling_delta_trn.py"),
)


def plant(folder, victims):
    """Makes links of all names that lead to files of the victim, some of which exist."""
    victims.mkdir()
    for i, name in enumerate(NAMES):
        target = victims / name
        if name == "config.json":  # which is read, too
            target.write_text((folder / name).read_text())
        elif i % 2:
            target.write_text(PRECIOUS)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    return {x.name: x.read_bytes() for x in victims.iterdir()}


def test_casting_and_completing_write_inside_of_their_folder(tmp_path):
    source, folder, victims = (tmp_path / name for name in ("source", "folder", "victims"))
    source.mkdir()
    write_whole(source, "qwen3_5")
    (source / "preprocessor_config.json").write_text("{}")
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    make("qwen3_5").save_pretrained(folder)
    before = plant(folder, victims)
    cast_weights(folder, torch.bfloat16)
    assert complete_weights(folder, source)
    assert {x.name: x.read_bytes() for x in victims.iterdir()} == before
    assert not (folder / "config.json").is_symlink()


def test_so_do_code_and_weights_in_another_format(tmp_path):
    folder, victims = tmp_path / "folder", tmp_path / "victims"
    m = model(dtype=torch.float32)
    m.save_pretrained(folder)
    before = plant(folder, victims)
    save_model(m, folder, format="fla")
    assert {x.name: x.read_bytes() for x in victims.iterdir()} == before


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="halfway"), replaced(path) as beside:
        beside.write_text("half")
        raise RuntimeError("halfway")
    assert [x.name for x in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        with replaced(tmp_path / "file") as beside:
            beside.write_text("new")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
