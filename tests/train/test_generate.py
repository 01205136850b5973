"""Text from checkpoints follows the model, is repeatable, and is streamed in whole characters."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_trn.train.data.tokenizer import plain_bytes
from delta_trn.train.run import sample as generation
from delta_trn.train.run.sample import Sampling, TextStream, continue_text, load_for_generation
from delta_trn.train.settings.errors import CheckpointError, ConfigError
from tests.support import tiny_run
from tests.support.corpus import prepare_text
from tests.support.tiny_run import keys, run_command, train

PROMPT = "7 + 5 ="


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    data = tiny_run.prepare_data(folder)
    # the best checkpoint is at step 30, so that last and best differ
    train("run", "tiny", *keys(data, folder / "run", steps=40, evaluation__every=10, checkpoint__every=20))
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path) -> Path:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def loaded(run):
    return load_for_generation(run / "checkpoints" / "step-00000040", torch.device("cpu"))


def generate(run: Path, *options: object) -> str:
    return train("generate", run, "--prompt", PROMPT, "sample.tokens=12", *options)


class TestText:
    def test_greedy_text_is_the_most_probable_token_of_the_uncached_model(self, run, loaded):
        model, tokenizer = loaded
        ids = tokenizer.encode(PROMPT)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos:
                break
        assert generate(run, "sample.temperature=0") == tokenizer.decode(ids) + "\n"

    def test_a_seed_repeats_its_text_and_another_seed_does_not(self, run):
        first = generate(run, "seed=3")
        assert first == generate(run, "seed=3")
        assert first.startswith(PROMPT) and first != generate(run, "seed=4")

    def test_sampling_from_one_candidate_is_greedy(self, run):
        greedy = generate(run, "sample.temperature=0")
        assert generate(run, "sample.top_k=1") == greedy
        assert generate(run, "sample.top_p=1e-6") == greedy
        assert generate(run, "sample.temperature=100") != greedy

    def test_sampling_without_limits_draws_from_all_tokens(self, loaded):
        """At a huge temperature every id is equally likely. The default of transformers is top_k=50."""
        model, tokenizer = loaded
        # several samples, because the end of the document is as likely as any other token
        samplings = (Sampling(tokens=60, temperature=1e6, seed=seed) for seed in range(8))
        text = "".join(continue_text(model, tokenizer, "", sampling) for sampling in samplings)
        assert len(set(text)) > 60

    def test_a_repetition_penalty_yields_more_distinct_characters(self, loaded):
        model, tokenizer = loaded
        free = Sampling(tokens=40, temperature=0)
        penalized = replace(free, repetition_penalty=1e6)
        plain, varied = (continue_text(model, tokenizer, PROMPT, s) for s in (free, penalized))
        assert len(set(varied)) > len(set(plain))

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(tokens=20, temperature=0),
            Sampling(tokens=20, temperature=0.9, top_k=30, top_p=0.95, repetition_penalty=1.2, seed=5),
        ],
        ids=["greedy", "drawn"],
    )
    def test_token_by_token_generation_equals_that_of_transformers(self, loaded, monkeypatch, sampling):
        """XLA's loop, whose shapes do not grow, gives the same tokens, draws, end and stream on the CPU."""
        model, tokenizer = loaded
        pieces: dict[str, list[str]] = {"transformers": [], "ours": []}
        texts = [continue_text(model, tokenizer, PROMPT, sampling, pieces["transformers"].append)]
        generate = type(model).generate

        def ours(self, ids, *, streamer, eos_token_id, **options):
            assert self is model and options["max_new_tokens"] == sampling.tokens
            return generation.token_by_token(model, ids, sampling, eos_token_id, streamer)

        monkeypatch.setattr(type(model), "generate", ours)
        texts.append(continue_text(model, tokenizer, PROMPT, sampling, pieces["ours"].append))
        assert texts[0] == texts[1] != "" and pieces["ours"] == pieces["transformers"]
        monkeypatch.setattr(type(model), "generate", generate)
        other = replace(sampling, temperature=1.5, seed=6)
        assert continue_text(model, tokenizer, PROMPT, other) != texts[0]

    def test_generated_text_ends_with_the_document(self, loaded, monkeypatch):
        model, tokenizer = loaded
        forward = type(model).forward

        def ending(self, *arguments, **options):
            out = forward(self, *arguments, **options)
            out.logits[..., tokenizer.eos] = 1e9
            return out

        monkeypatch.setattr(type(model), "forward", ending)
        assert continue_text(model, tokenizer, PROMPT, Sampling(tokens=40)) == ""

    def test_generation_restores_the_random_state_and_training_mode(self, loaded):
        model, tokenizer = loaded
        before = torch.get_rng_state()
        model.train()
        continue_text(model, tokenizer, PROMPT, Sampling(tokens=4))
        assert torch.equal(torch.get_rng_state(), before) and model.training
        model.eval()

    def test_multibyte_characters_are_streamed_whole(self):
        tokenizer = plain_bytes()
        text = "naïve — 𝛿"
        pieces: list[str] = []
        stream = TextStream(tokenizer, pieces.append)
        stream.put(torch.tensor([[tokenizer.bos, 1, 2]]))  # transformers sends the prompt first
        for byte in text.encode():
            stream.put(torch.tensor([byte]))
        stream.end()
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) and len(pieces) == len(text)

    def test_an_incomplete_character_is_streamed_at_the_end(self):
        pieces: list[str] = []
        stream = TextStream(plain_bytes(), pieces.append)
        for ids in ([256], [ord("a")], [0xE2]):
            stream.put(torch.tensor(ids))
        stream.end()
        assert "".join(pieces) == "a\ufffd"


class TestCheckpoints:
    def test_generation_loads_the_best_last_or_numbered_checkpoint(self, run):
        by_default = generate(run, "sample.temperature=0")
        assert generate(run, "sample.temperature=0", "--checkpoint", "last") == by_default
        for which, folder in (("best", "best"), ("20", "step-00000020")):
            model, tokenizer = load_for_generation(run / "checkpoints" / folder, torch.device("cpu"))
            text = continue_text(model, tokenizer, PROMPT, Sampling(tokens=12, temperature=0))
            assert generate(run, "sample.temperature=0", "--checkpoint", which) == f"{PROMPT}{text}\n"

    @pytest.mark.parametrize(
        ("which", "message"),
        [
            ("7", "no checkpoint of step 7 .* there are: 20, 30, 40"),
            ("newest", "expected best, last, or one of 20, 30, 40"),
        ],
    )
    def test_generation_from_an_unknown_checkpoint_is_refused(self, run, which, message):
        with pytest.raises(AssertionError, match=message):
            generate(run, "--checkpoint", which)

    def test_generation_refuses_a_damaged_checkpoint_and_names_others(self, copy):
        (copy / "checkpoints" / "step-00000040" / "model.safetensors").write_bytes(b"")
        status, out, err = run_command("generate", copy, "--prompt", PROMPT)
        assert (status, out) == (2, "")
        assert "step 40 is damaged" in err and "other steps: 20, 30" in err
        assert generate(copy, "--checkpoint", 20).startswith(PROMPT)

    def test_generation_reports_a_missing_best_checkpoint(self, copy):
        (copy / "checkpoints" / "best").unlink()
        status, _, err = run_command("generate", copy, "--prompt", PROMPT, "--checkpoint", "best")
        assert status == 2 and "has no best checkpoint" in err and "20, 30, 40" in err


class TestTokenizer:
    def test_a_tokenizer_with_more_ids_than_rows_is_refused(self, copy, tmp_path):
        folder = copy / "checkpoints" / "step-00000040"
        source = tmp_path / "text.txt"
        source.write_text(tiny_run.make_text())
        other = prepare_text(source, tmp_path / "bpe", tokenizer="bytebpe", vocab_size=400)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(other / name, folder / name)
        with pytest.raises(CheckpointError, match=r"it has .* ids, the model 320 rows; bos is 0"):
            load_for_generation(folder, torch.device("cpu"))
        status, _, err = run_command("generate", copy, "--prompt", PROMPT)
        assert status == 2 and "tokenizer.json" in err, "in a run's checkpoint the manifest calls it damage"

    def test_a_tokenizer_of_the_same_size_with_other_ids_is_refused(self, copy):
        """Every id has a row and the special tokens agree, but the letters have other ids."""
        folder = copy / "checkpoints" / "step-00000040"
        path = folder / "tokenizer.json"
        tree = json.loads(path.read_bytes())
        vocabulary = tree["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        path.write_text(json.dumps(tree))
        with pytest.raises(CheckpointError, match=r"its sha256 is .* the model was trained with"):
            load_for_generation(folder, torch.device("cpu"))


class TestOptions:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["sample.tokens=0"], "tokens=0: expected at least 1"),
            (["sample.temperature=-1"], "sample.temperature=-1: expected at least 0"),
            (["sample.temperature=nan"], "sample.temperature=nan: expected a"),
            (["sample.top_k=0"], "sample.top_k=0: expected at least 1"),
            (["sample.top_p=0"], "sample.top_p=0: expected more than 0"),
            (["sample.top_p=1.5"], "sample.top_p=1.5: expected at most 1"),
            (["--repetition-penalty", "0"], "repetition_penalty=0.0: expected more than 0"),
            (["device=tpu9"], "device=tpu9"),
            (["--tokens", "9"], "keys have no dashes: sample.tokens=9"),
            (["--top-k=9"], "keys have no dashes: sample.top_k=9"),
            (["--device", "cpu"], "keys have no dashes: device=cpu"),
            (["steps=9"], "steps changes nothing in `generate`, whose keys are sample.tokens, sample.temp"),
        ],
    )
    def test_wrong_words_are_refused_with_what_was_expected(self, run, words, message):
        status, out, err = run_command("generate", run, "--prompt", PROMPT, *words)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1

    def test_sampling_validates_its_fields(self):
        with pytest.raises(ConfigError, match="top_k=-3"):
            Sampling(top_k=-3)
