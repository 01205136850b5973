"""lm-eval, run by the command of docs/export.md on an exported model,
has the numbers that we compute.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import delta_trn  # noqa: F401 - registers the models
from tests.support import tiny_run
from tests.support.tiny_run import keys, tolerance, train

pytest.importorskip("lm_eval", reason="lm-eval is not installed here; make test-lm-eval has it")
PAGE = (Path(__file__).parents[3] / "docs" / "export.md").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a trained model, and with what the page's command wrote about it."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = tiny_run.prepare_data(folder)
    train("run", "tiny", *keys(data, folder / "run", steps=40))
    train("export", folder / "run", "--to", folder / "model", "--remote-code")
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = re.search(r"^lm_eval .*?[^\\]\n", PAGE, re.MULTILINE | re.DOTALL)
    words = shlex.split(command[0].replace("\\\n", " "))
    offline = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, **offline},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def model_and_tokenizer(place):
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    return model, PreTrainedTokenizerFast.from_pretrained(place / "model")


def samples(place, task):
    (path,) = (place / "scores").rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_likelihoods(model, begin, asked):
    """Returns the log-likelihood of every (context, continuation),
    each alone, in the model's dtype.
    """
    values = []
    for context, continuation in asked:
        # one token per byte
        ids = torch.tensor([[*begin, *context.encode(), *continuation.encode()]])
        with torch.no_grad():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        own = log_p.gather(1, ids[0, 1:, None])[-len(continuation.encode()) :]
        values.append(float(own.sum()))
    return values


def distance(values, exact):
    return max(abs(a - b) / abs(b) for a, b in zip(values, exact, strict=True))


def test_log_likelihoods_are_those_computed_by_hand(place, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    asked, scores = [], []
    for sample in samples(place, "sums_choice"):
        pairs = [(request["arg_0"], request["arg_1"]) for request in sample["arguments"].values()]
        asked += pairs
        scores += [float(response[0][0]) for response in sample["resps"]]
    assert len(scores) == 9
    rounded = log_likelihoods(model, [tokenizer.bos_token_id], asked)
    exact = log_likelihoods(model.double(), [tokenizer.bos_token_id], asked)
    no_bos = log_likelihoods(model, [], asked)
    no_context = log_likelihoods(model, [tokenizer.bos_token_id], [("", text) for _, text in asked])
    model.float()
    allowed = tolerance([distance(rounded, exact)])
    assert distance(scores, exact) <= allowed
    assert distance(no_context, exact) > 100 * allowed
    assert distance(no_bos, exact) > 10 * distance(scores, exact)


def test_accuracy_counts_the_most_probable_choices(place):
    (path,) = (place / "scores").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    right = []
    for sample in samples(place, "sums_choice"):
        values = [float(response[0][0]) for response in sample["resps"]]
        right.append(values.index(max(values)) == int(sample["target"]))
    assert results["sums_choice"]["acc,none"] == pytest.approx(sum(right) / 3)


def test_generated_texts_are_greedy_and_end_where_the_task_says(place, model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    texts = samples(place, "sums_text")
    assert len(texts) == 3
    for sample in texts:
        prompt = tokenizer(sample["arguments"]["gen_args_0"]["arg_0"], return_tensors="pt")
        prompt.pop("token_type_ids", None)
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == text.split("\n")[0] != ""
