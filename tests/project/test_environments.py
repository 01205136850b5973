"""How the Makefile's environments are made; pip and Python are not called here."""

import re
from pathlib import Path

import pytest

from tools import environments
from tools.environments import AWS_HOLDS, ENVIRONMENTS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The commands that would run, in a folder without environments."""
    made: list[str] = []

    def run(*words):
        made.append(" ".join(map(str, words)))
        if "venv" in words:
            python = Path(words[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()

    def output(python, *words):
        if "list" in words:
            return "torch==2.9.0\nnumpy==2.1.0\npillow==1.0\nML_dtypes==0.5.0\nlibneuronxla==1"
        place = Path(python).parents[1] / "packages"
        place.mkdir(parents=True, exist_ok=True)
        return str(place)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environments, "run", run)
    monkeypatch.setattr(environments, "output", output)
    monkeypatch.setattr(environments, "finds", lambda python, module: False)
    return made


def test_every_installation_says_first_what_it_installs_and_how_long_that_takes():
    """pip is told to be quiet, which for minutes looks like a command that hangs."""
    for name, environment in ENVIRONMENTS.items():
        assert re.search(r"[GM]B, .*minute", environment.needs), name


def test_the_makefile_names_every_environment():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^(?:.* )?\$\(VENV\)([\w-]*)/\.ready:", makefile, re.MULTILINE))
    named |= (
        {""} if re.search(r"^READY\s*:= \$\(VENV\)/\.ready$", makefile, re.MULTILINE) else set()
    )
    assert {f".venv{name}" for name in named} == set(ENVIRONMENTS)


def test_torch_comes_first_and_a_triton_of_its_own_is_kept(calls, monkeypatch, capsys):
    environments.make(".venv")
    names = [re.search(r"(torch==\S+|triton==\S+|\.\[dev\])$", call) for call in calls[1:]]
    assert [name and name[1] for name in names] == ["torch==2.13.0", "triton==3.7.1", ".[dev]"]
    assert capsys.readouterr().out.startswith("installing PyTorch and the packages beside it into")
    calls.clear()
    monkeypatch.setattr(environments, "finds", lambda python, module: True)
    environments.make(".venv")  # which is there now
    assert len(calls) == 2 and not any("triton" in call or "venv " in call for call in calls)


@pytest.mark.parametrize("name", [".venv-lm-eval", ".venv-trl"])
def test_one_behind_another_sees_its_packages(name, calls):
    environments.make(name)
    assert len(calls) == 2 and "-c .ci/constraints.txt" in calls[1]
    line = Path(name, "packages", "venv.pth").read_text()
    assert line == "import site; site.addsitedir('.venv/packages')\n"


def test_the_wheel_is_installed_into_a_new_folder(calls):
    old = Path(".venv-fresh", "old")
    old.parent.mkdir()
    old.touch()
    environments.make(".venv-fresh")
    assert not old.exists() and [call.split()[3] for call in calls[1:]] == ["wheel", "install"]
    assert not any("constraints" in call for call in calls)


def test_neurons_holds_what_runs_beside_the_compiler_and_hides_nothing_else(
    calls, monkeypatch, tmp_path
):
    aws = tmp_path / "aws"
    (aws / "bin").mkdir(parents=True)
    (aws / "bin" / "python").touch(mode=0o755)
    monkeypatch.setenv("AWS", str(aws))
    monkeypatch.setattr(environments, "AWS", ["/no/such/folder"])
    environments.make(".venv-neuron")
    held = Path(".venv-neuron", "constraints.txt").read_text().split()
    assert held == ["torch==2.9.0", "numpy==2.1.0", "ML_dtypes==0.5.0", "libneuronxla==1"]
    assert "-c .venv-neuron/constraints.txt" in calls[-1]
    assert Path(".venv-neuron", "packages", "aws.pth").read_text() == f"{aws}/packages\n"
    assert f'PATH="$PATH:{aws}/bin"' in Path(".venv-neuron", "bin", "activate").read_text()
    assert {"torch", "neuron", "nki", "protobuf"} < set(AWS_HOLDS)


def test_no_environment_of_aws_is_refused_with_what_to_do(calls, monkeypatch):
    monkeypatch.delenv("AWS", raising=False)
    monkeypatch.setattr(environments, "AWS", ["/no/such/folder"])
    with pytest.raises(SystemExit, match=r"/no/such/folder is no environment.*make neuron AWS=DIR"):
        environments.make(".venv-neuron")
    assert not calls


def test_another_python_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(environments.sys, "version_info", (3, 9, 1))
    assert environments.main([".venv"]) == 1
    assert "needs Python 3.10 or newer, this is 3.9.1; try make PYTHON=" in capsys.readouterr().out


def test_versions_are_those_in_front(capsys):
    assert environments.main(["--versions"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert re.match(r"\d", lines["torch"]) and re.match(r"\d", lines["transformers"])
