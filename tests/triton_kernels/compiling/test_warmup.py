"""After `delta-trn warmup`, the model that it was made for compiles no kernel.

What a run launches is in tests/train/test_warmup.py.
"""

import os
import re

import pytest

from tests.support.warm import run_python

pytest.importorskip("triton", reason="the triton extra is not installed")


def python(*words, cache, **variables):
    """Runs Python without Triton's interpreter. Returns status, stdout and stderr."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **variables}
    done = run_python(words, timeout=600, env=environment)
    return done.returncode, done.stdout, done.stderr


def warm(*words, cache, **variables):
    return python("-m", "delta_trn.train", "warmup", *words, cache=cache, **variables)


COMPILE = """
import sys
from delta_trn.backends.gpu_stand_in.cuda import card
from delta_trn.backends.gpu_stand_in.launch_adapter import compile_only, counting
from delta_trn.train.run.launches import launch_model
with counting() as compiled, compile_only(card((9, 0))):
    launch_model(sys.argv[1], 1, int(sys.argv[2]))
print("COMPILED", len(compiled))
"""


@pytest.mark.timeout(900)
def test_a_model_compiles_nothing_after_its_warmup(tmp_path):
    from delta_trn.models import DeltaConfig

    model, cache = tmp_path / "model", tmp_path / "cache"
    sizes = {"hidden_size": 32, "num_heads": 1, "head_dim_k": 16, "num_hidden_layers": 1}
    DeltaConfig(vocab_size=50, **sizes).save_pretrained(model)
    words = "--model", model, "--row-length", "64"
    status, out, error = warm(*words, "--capability", "9.0", cache=cache)
    assert status == 0, error
    count = int(re.findall(r"^(\d+) kernels$", out, re.MULTILINE)[0])
    assert count > 10 and re.search(rf"^{count}/{count}, 0 s left", out, re.MULTILINE)
    assert f"{count} compiled in " in out
    status, out, _ = python("-c", COMPILE, model, 64, cache=cache)
    assert status == 0 and out.split()[-2:] == ["COMPILED", "0"]
    status, out, _ = warm(*words, "--capability", "9.0", cache=cache)
    assert status == 0 and re.search(
        rf"^0 compiled in \d+ s, {count} were in the cache, 0 failed", out, re.MULTILINE
    )
    # the second process of a node leaves it to the first
    status, out, _ = warm(*words, "--capability", "8.0", cache=cache, LOCAL_RANK="1")
    assert (status, out) == (0, "")
    status, out, _ = python("-c", COMPILE, model, 1, cache=cache)
    assert int(out.split()[-1]) > 0, "one token alone takes kernels that were not warmed up for"
