"""The built wheel, installed beside a user's own files of our folders' names."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
# A user's own modules, which an installed delta_trn must neither take nor be taken for.
OWN = ("models/__init__.py", "backends.py", "train.py", "tests.py")
USE = """
import torch
from transformers import AutoModelForCausalLM
import delta_trn

model = AutoModelForCausalLM.from_pretrained("{folder}")
print(type(model).__module__, model(torch.tensor([[1, 2, 3]])).logits.shape[-1] == model.config.vocab_size)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The scripts' folder of a new environment that holds the wheels of our two packages alone.

    Its dependencies come from this environment by PYTHONPATH, which does not read an editable
    installation's .pth file: delta_trn itself can only be found in the wheel.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    build += [ROOT, ROOT / "packages" / "nki-simulator"]
    with FileLock(tmp_path_factory.getbasetemp().parent / "wheel.lock"):  # builds share ROOT/build
        subprocess.run(build, check=True, capture_output=True, text=True)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", *wheels], check=True)
    return folder / "env" / "bin"


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A user's folder with modules of our folders' names,
    each of which fails when it is imported.
    """
    for name in OWN:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise ImportError('{name} belongs to the user')\n")
    return tmp_path


def call(command: list[object], folder: Path) -> str:
    """What a command printed that ran in `folder` and had to succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "OMP_NUM_THREADS": "1",
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_trains_and_opens_models_where_a_user_has_such_names(installed, elsewhere):
    """`delta-trn run tiny`, then AutoModelForCausalLM
    on its checkpoint after `import delta_trn` alone.
    """
    text = "<|endoftext|>".join(f"{n} + {n} = {2 * n}\n" * 20 for n in range(40))
    (elsewhere / "sums.txt").write_text(text)
    keys = ["data.source=sums.txt", "steps=4", "out=run", "device=cpu"]
    call([installed / "delta-trn", "run", "tiny", *keys], elsewhere)
    (checkpoint,) = sorted((elsewhere / "run" / "checkpoints").glob("step-00000004"))
    use = USE.format(folder=checkpoint)
    assert (
        call([installed / "python", "-c", use], elsewhere)
        == "delta_trn.models.language_model True\n"
    )


def test_the_wheel_holds_scripts_kernel_sources_and_tables_and_nothing_at_the_top(installed):
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert (packages / "delta_trn" / "train" / "launch" / "trn1.32xlarge.sh").exists()
    kernels = (packages / "delta_trn" / "backends").rglob("*.[ch]*")
    expected = {
        "chunked_kernel.cpp",
        "chunked_head.h",
        "chunked_products.h",
        "cpu_kernel.cpp",
        "exponential.h",
    }
    assert expected <= {path.name for path in kernels}
    files = [file for folder in (ROOT / "delta_trn").iterdir() for file in folder.rglob("*.*")]
    tables = {file.relative_to(ROOT) for file in files if file.suffix in (".csv", ".json", ".md")}
    assert len(tables) >= 2 and all((packages / table).exists() for table in tables)
    top = {path.name for path in packages.iterdir() if "dist-info" not in path.name}
    assert top == {"delta_trn", "nki_simulator"}
    package = ROOT / "packages" / "nki-simulator" / "src"
    ours = [path for path in package.rglob("*.*") if path.suffix in (".py", ".csv", ".json")]
    assert len(ours) > 30 and all((packages / path.relative_to(package)).exists() for path in ours)
    assert (installed / "nki-simulator").exists()


def test_the_description_of_the_wheel_is_the_readme_without_what_only_a_checkout_shows(installed):
    """A package index shows neither pictures of a checkout nor its files."""
    (found,) = (installed.parent / "lib").glob(
        "python*/site-packages/delta_trn-*.dist-info/METADATA"
    )
    head, _, text = found.read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head and "Requires-Dist: peft>=" in head
    assert text.startswith("# delta-trn\n") and "make train" in text and "![" not in text
    assert re.findall(r"\]\((?!https://)", text) == [] and text.count("](https://") >= 2


def test_importing_delta_trn_loads_neither_torch_nor_transformers(installed, elsewhere):
    code = (
        "import sys, delta_trn, nki_simulator\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert call([installed / "python", "-c", code], elsewhere) == "[]\n"


OPERATIONS_ALONE = """
import re, sys
from importlib.metadata import requires

kept = {"torch", "numpy", "ml_dtypes", "filelock"}  # torch itself needs filelock
needed = {re.match(r"[\\w.-]+", line)[0] for line in requires("delta-trn") if "extra ==" not in line}
assert kept < needed and "transformers" in needed
for name in needed - kept:
    sys.modules[name] = None  # its import raises, as where it is not installed
import delta_trn, torch

q, v, g = torch.randn(1, 70, 1, 8), torch.randn(1, 70, 2, 16), -torch.rand(1, 70, 2)
x, beta = torch.randn(4, 8), torch.rand(4)
for backend in (None, "nki-simulator"):
    o, state = delta_trn.gated_delta_rule(q, q, v, g, -g, output_final_state=True, backend=backend)
    delta_trn.gated_delta_rule_step(q[:, 0], q[:, 0], v[:, 0], g[:, 0], -g[:, 0], state, backend=backend)
    delta_trn.delta_residual(x, x, beta, beta, backend=backend)
    print(o.shape == v.shape)
print(len(delta_trn.describe()) > 0)
try:
    delta_trn.DeltaForCausalLM
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_the_operations_need_torch_numpy_and_ml_dtypes_alone(installed, elsewhere):
    """So `pip install --no-deps` is enough beside packages that must stay. Models need the rest."""
    out = call([installed / "python", "-c", OPERATIONS_ALONE], elsewhere)
    assert out == "True\nTrue\nTrue\ntransformers\n"


def test_a_command_that_does_not_exist_names_the_nearest(installed, elsewhere):
    done = subprocess.run(
        [installed / "delta-trn", "bensh"], cwd=elsewhere, capture_output=True, text=True
    )
    assert done.returncode == 2 and "did you mean bench?" in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        # loads the names of all models when it is half loaded itself
        "from transformers.models.qwen3_next import modeling_qwen3_next",
        "import delta_trn.models.gated_deltanet",  # half loaded when transformers is
    ],
)
def test_transformers_knows_the_models_whatever_is_imported_first(installed, elsewhere, first):
    code = (
        f"import delta_trn\n{first}\nfrom transformers import AutoConfig\n"
        "print(AutoConfig.for_model('delta_trn').model_type)"
    )
    assert call([installed / "python", "-c", code], elsewhere) == "delta_trn\n"
