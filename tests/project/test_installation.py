"""The built wheel, installed beside a user's own files of our folders' names."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

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
    """The scripts' folder of a new environment that holds nothing but the wheel.

    Its dependencies come from this environment by PYTHONPATH, which does not read an editable installation's
    .pth file: delta_trn itself can only be found in the wheel.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, text=True)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    return folder / "env" / "bin"


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A user's folder with modules of our folders' names, each of which fails when it is imported."""
    for name in OWN:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise ImportError('{name} belongs to the user')\n")
    return tmp_path


def call(command: list[object], folder: Path) -> str:
    """What a command printed that ran in `folder` and had to succeed."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_trains_and_opens_models_where_a_user_has_such_names(installed, elsewhere):
    """`delta-trn run tiny`, then AutoModelForCausalLM on its checkpoint after `import delta_trn` alone."""
    text = "<|endoftext|>".join(f"{n} + {n} = {2 * n}\n" * 20 for n in range(40))
    (elsewhere / "sums.txt").write_text(text)
    keys = ["data.source=sums.txt", "steps=4", "out=run", "device=cpu"]
    call([installed / "delta-trn", "run", "tiny", *keys], elsewhere)
    (checkpoint,) = sorted((elsewhere / "run" / "checkpoints").glob("step-00000004"))
    use = USE.format(folder=checkpoint)
    assert call([installed / "python", "-c", use], elsewhere) == "delta_trn.models.language_model True\n"


def test_the_wheel_holds_launch_scripts_and_kernel_sources_and_nothing_at_the_top(installed):
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert (packages / "delta_trn" / "train" / "launch" / "trn1.32xlarge.sh").exists()
    kernels = (packages / "delta_trn" / "backends").glob("*/*.[ch]*")
    assert {"chunked_kernel.cpp", "chunked_products.h", "cpu_kernel.cpp"} <= {path.name for path in kernels}
    top = {path.name for path in packages.iterdir() if "dist-info" not in path.name}
    assert top == {"delta_trn"}


def test_importing_delta_trn_loads_neither_torch_nor_transformers(installed, elsewhere):
    code = (
        "import sys, delta_trn, delta_trn.nki_kernels.simulator\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert call([installed / "python", "-c", code], elsewhere) == "[]\n"


def test_a_command_that_does_not_exist_names_the_nearest(installed, elsewhere):
    done = subprocess.run([installed / "delta-trn", "bensh"], cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 2 and "did you mean bench?" in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "from transformers import AutoConfig",
        # loads the names of all models when it is half loaded itself
        "from transformers.models.qwen3_next import modeling_qwen3_next",
        "import delta_trn.nki_kernels.simulator",
        "import delta_trn.models.gated_deltanet",  # half loaded when transformers is
    ],
)
def test_transformers_knows_the_models_whatever_is_imported_first(installed, elsewhere, first):
    code = (
        f"import delta_trn\n{first}\nfrom transformers import AutoConfig\n"
        "print(AutoConfig.for_model('delta_trn').model_type)"
    )
    assert call([installed / "python", "-c", code], elsewhere) == "delta_trn\n"
