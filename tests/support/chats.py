"""Tiny models with a tokenizer of bytes and a chat template, and conversations of sums, for fine-tuning."""

import json
from pathlib import Path

import torch

from delta_trn import DeltaConfig, DeltaForCausalLM
from delta_trn.models.ecosystem.weights import save_model
from delta_trn.train.data.tokenizer import plain_bytes
from tests.models.ecosystem.test_patching import make

# ChatML without its special tokens, and the same with transformers' marks of what the assistant says
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m.content + '</>' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '</>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '</>' }}{% endif %}",
)
BYTES = 320


def our_model() -> DeltaForCausalLM:
    torch.manual_seed(0)
    return DeltaForCausalLM(
        DeltaConfig(
            vocab_size=BYTES, hidden_size=32, base_width=16, num_hidden_layers=2, num_heads=2,
            intermediate_multiple=16, attention_layers=[1], initializer_range=0.1,
        )
    )  # fmt: skip


def save(family: str, folder: Path, template: str | None = CHATML) -> Path:
    """Writes a model (ours, fla, or a family of transformers) with its tokenizer, and returns its folder."""
    if family in ("ours", "fla"):
        model = our_model() if family == "ours" else DeltaForCausalLM(DeltaConfig(
            vocab_size=BYTES, hidden_size=32, num_hidden_layers=2, num_heads=2, intermediate_multiple=16,
            parametrization="sp",
        ))  # fmt: skip
        save_model(model, folder, "delta" if family == "ours" else "fla")
    else:
        make(family, vocab_size=BYTES, max_position_embeddings=256).save_pretrained(folder)
    plain_bytes().save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def turns(*texts: str) -> dict:
    """Returns a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(path: Path) -> Path:
    """Writes 40 conversations, of which a tiny model learns a little in a few steps."""
    rows = []
    for i in range(40):
        a, b = i % 7, i % 5
        long = (f"and {b}+{b}?", f"{b + b}") if i % 3 == 0 else ()
        rows.append(turns(f"{a}+{b}? #{i}", f"{a + b}", *long))
    rows[1] = {"prompt": "1+1?", "completion": "2"}
    return write(path, rows)
