"""Uses an installed wheel as its users do, with whatever releases pip has chosen: `make
test-fresh`.

Runs `delta-trn run tiny` and `generate`, every Python example of the README, and a patched model of
transformers, in an empty folder. It imports nothing of the checkout, and exits with 1 at the first
failure.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
COMMAND = Path(sys.executable).parent / "delta-trn"
PATCHED = """
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from delta_trn import check_packing, patch_transformers

torch.manual_seed(0)
sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
heads |= {"num_key_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
kinds = {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": None}
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, **kinds)).eval()
for p in model.parameters():
    if p.dim() > 1:
        torch.nn.init.normal_(p, std=0.3)
ids = torch.randint(2, 61, (2, 40))
loss, tokens = model(ids, labels=ids).loss, model.generate(ids, max_new_tokens=4, do_sample=False)
with patch_transformers(model, backend="chunked"):
    assert (model(ids, labels=ids).loss - loss).abs() < 1e-5
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), tokens)
    report = check_packing(model)
    assert report, str(report)
"""


def call(words: list[object], folder: Path) -> None:
    """Runs a command in `folder`; ends this programme with its output if it fails."""
    print("running", *words[:6] if "-c" not in words else ["an example"], flush=True)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, env=offline, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"{done.stdout}{done.stderr}\n{' '.join(map(str, words))}\nexits with {done.returncode}"
        )


def main() -> None:
    """Runs everything in a folder that is gone afterwards."""
    names = ("delta-trn", "torch", "transformers", "tokenizers", "datasets", "numpy")
    print(", ".join(f"{name} {version(name)}" for name in names))
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    if len(examples) < 2:
        sys.exit(f"{README} has {len(examples)} Python examples, expected at least 2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "<|endoftext|>".join(f"{n} + {n} = {2 * n}\n" * 20 for n in range(40))
        (folder / "sums.txt").write_text(text)
        call(
            [COMMAND, "run", "tiny", "data.source=sums.txt", "steps=10", "out=run", "device=cpu"],
            folder,
        )
        call([COMMAND, "generate", "run", "--prompt", "1 + 1"], folder)
        for example in [*examples, PATCHED]:
            call([sys.executable, "-c", example], folder)
    print("all right")


if __name__ == "__main__":
    main()
