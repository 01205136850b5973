"""Text from checkpoints follows the model, is repeatable, and is streamed in whole characters."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from delta_trn.train.data.tokenizer import plain_bytes
from delta_trn.train.run import sample
from delta_trn.train.run.sample import continue_text, load_for_generation
from delta_trn.train.settings.schema import SampleSection
from tests.support import tiny_run
from tests.support.tiny_run import keys, run_command, train

PROMPT = "7 + 5 ="


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    data = tiny_run.prepare_data(folder)
    # the best checkpoint is at step 30, so that last and best differ
    train(
        "run",
        "tiny",
        *keys(data, folder / "run", steps=40, evaluation__every=10, checkpoint__every=20),
    )
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


class TestBesideARunningRun:
    @pytest.mark.parametrize("command", ["generate", "export", "convert"])
    def test_a_checkpoint_that_goes_while_it_is_read_is_chosen_again(
        self, copy, tmp_path, command, monkeypatch
    ):
        """The newest is renamed between its choice and its opening, as rotation does first."""
        choose, gone = sample.choose_checkpoint, []

        def choose_and_lose(folder, which):
            path = choose(folder, which)
            if not gone:
                gone.append(path.rename(path.with_name(f".{path.name}.old")))
            return path

        monkeypatch.setattr(sample, "choose_checkpoint", choose_and_lose)
        to = tmp_path / "to"
        words = ["--prompt", PROMPT] if command == "generate" else ["--to", to]
        train(command, copy, *words, "--checkpoint", "last")
        assert [path.name for path in gone] == [".step-00000040.old"]
        if command != "generate":
            before = copy / "checkpoints" / "step-00000030"
            weights, expected = (load_file(path / "model.safetensors") for path in (to, before))
            assert all(torch.equal(weights[name], x) for name, x in expected.items())

    def test_one_that_cannot_be_read_though_none_was_removed_is_an_error(self, copy):
        for path in (copy / "checkpoints").glob("step-*/config.json"):
            path.unlink()
        code, _, errors = run_command("generate", copy, "--prompt", PROMPT)
        assert code == 2 and "damaged" in errors


class TestText:
    def test_what_tiny_writes_after_the_eight_steps_of_the_docs_can_be_read(self, tmp_path):
        """At a tenth of the rate it draws bytes that are no text,
        and a new user thinks that it is broken.
        """
        data, texts = tiny_run.prepare_data(tmp_path), []
        for rate in ("", "optimizer.lr=0.01"):
            out = tmp_path / f"run{rate}"
            words = [f"data.source={data}", "device=cpu", "steps=8", f"out={out}"]
            train("run", "tiny", *filter(None, [*words, rate]))
            texts.append(train("generate", out, "--prompt", "def "))
        strange = [
            sum(not c.isascii() or not (c.isprintable() or c == "\n") for c in x) for x in texts
        ]
        assert strange[0] <= 0.02 * len(texts[0]) and strange[1] >= 0.2 * len(texts[1]), texts

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
        """At a huge temperature every id is equally likely.
        The default of transformers is top_k=50.
        """
        model, tokenizer = loaded
        # several samples, because the end of the document is as likely as any other token
        how = SampleSection(tokens=60, temperature=1e6, top_k=None)
        text = "".join(continue_text(model, tokenizer, "", how, seed=seed) for seed in range(8))
        assert len(set(text)) > 60

    def test_a_repetition_penalty_yields_more_distinct_characters(self, loaded):
        model, tokenizer = loaded
        how = SampleSection(tokens=40, temperature=0)
        plain, varied = (
            continue_text(model, tokenizer, PROMPT, how, seed=0, repetition_penalty=penalty)
            for penalty in (1.0, 1e6)
        )
        assert len(set(varied)) > len(set(plain))

    def test_generated_text_ends_with_the_document(self, loaded, monkeypatch):
        model, tokenizer = loaded
        forward = type(model).forward

        def ending(self, *arguments, **options):
            out = forward(self, *arguments, **options)
            out.logits[..., tokenizer.eos] = 1e9
            return out

        monkeypatch.setattr(type(model), "forward", ending)
        assert continue_text(model, tokenizer, PROMPT, SampleSection(tokens=40), seed=0) == ""

    def test_generation_restores_the_random_state_and_training_mode(self, loaded):
        model, tokenizer = loaded
        before = torch.get_rng_state()
        model.train()
        continue_text(model, tokenizer, PROMPT, SampleSection(tokens=4), seed=0)
        assert torch.equal(torch.get_rng_state(), before) and model.training
        model.eval()

    def test_text_is_streamed_in_whole_characters(self, loaded):
        model, _ = loaded
        tokenizer, pieces, text = plain_bytes(), [], "naïve\n— 𝛿 end"
        written = iter([*text.encode(), tokenizer.eos])

        class Scripted(type(model)):
            def forward(self, *arguments, **options):
                out = super().forward(*arguments, **options)
                out.logits[..., next(written)] = 1e9
                return out

        scripted = Scripted(model.config)
        how = SampleSection(tokens=40, temperature=0)
        assert continue_text(scripted, tokenizer, PROMPT, how, seed=0, stream=pieces.append) == text
        assert "".join(pieces) == text and len(pieces) > 3
        assert all("\ufffd" not in piece for piece in pieces)


class TestCheckpoints:
    def test_generation_loads_the_best_last_or_numbered_checkpoint(self, run):
        by_default = generate(run, "sample.temperature=0")
        assert generate(run, "sample.temperature=0", "--checkpoint", "last") == by_default
        for which, folder in (("best", "best"), ("20", "step-00000020")):
            model, tokenizer = load_for_generation(
                run / "checkpoints" / folder, torch.device("cpu")
            )
            greedy = SampleSection(tokens=12, temperature=0)
            text = continue_text(model, tokenizer, PROMPT, greedy, seed=0)
            assert (
                generate(run, "sample.temperature=0", "--checkpoint", which) == f"{PROMPT}{text}\n"
            )

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


class TestOptions:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["sample.tokens=0"], "sample.tokens=0: expected more than 0"),
            (["--checkpoint", "newest"], "expected best, last, or one of 20, 30, 40"),
            (["sample.temperature=-1"], "sample.temperature=-1: expected at least 0"),
            (["sample.temperature=nan"], "sample.temperature=nan: expected a"),
            (["sample.top_k=0"], "sample.top_k=0: expected at least 1"),
            (["sample.top_p=0"], "sample.top_p=0: expected more than 0"),
            (["sample.top_p=1.5"], "sample.top_p=1.5: expected at most 1"),
            (["--repetition-penalty", "0"], "--repetition-penalty=0.0: expected more than 0"),
            (["device=tpu9"], "device=tpu9"),
            (["--tokens", "9"], "keys have no dashes: sample.tokens=9"),
            (["--top-k=9"], "keys have no dashes: sample.top_k=9"),
            (["--device", "cpu"], "keys have no dashes: device=cpu"),
            (
                ["steps=9"],
                "steps changes nothing in `generate`, whose keys are sample.tokens, sample.temp",
            ),
        ],
    )
    def test_wrong_words_are_refused_with_what_was_expected(self, run, words, message):
        status, out, err = run_command("generate", run, "--prompt", PROMPT, *words)
        assert (status, out) == (2, "") and message in err and err.count("\n") == 1
