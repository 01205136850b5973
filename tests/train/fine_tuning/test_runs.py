"""Fine-tuning, by the command: every family learns, packed is alone, stops change nothing, others open it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from delta_trn.backends.parity.judge import error
from delta_trn.train.data.loader import IGNORED
from delta_trn.train.run.optimizer import ADAPTER_RATE, make_optimizer
from delta_trn.train.run.pretrained import find_model, load, own_rate, prepare
from delta_trn.train.run.setup import start
from delta_trn.train.settings.schema import RunConfig
from tests.support import chats, team_run, tiny_run
from tests.support.tiny_run import read_metrics, run_command, train

# family and rank of the adapters; 0: all weights are trained
RUNS = [("ours", 0), ("ours", 4), ("fla", 0), ("qwen3_next", 0), ("qwen3_next", 4), ("qwen3_5", 4)]
RUNS += [("olmo_hybrid", 0)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Returns a function of a family: the folder of a tiny model, written once."""
    place = tmp_path_factory.mktemp("models")

    def folder(family):
        path = place / family
        return path if path.exists() else chats.save(family, path)

    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return chats.sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


def keys(model: Path, source: Path, out: Path, **changes: object) -> list[str]:
    values = {
        "model.from": model, "data.source": source, "out": out, "device": "cpu", "precision": "float32",
        "epochs": "none", "steps": 8, "batch.length": 96, "batch.sequences": 4, "batch.micro": 2,
        "optimizer.lr": 4e-3, "schedule.warmup": 1, "evaluation.every": 4, "checkpoint.every": 4,
        "sample.tokens": 4, "sample.prompt": "1+2?", "log.every": 4,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def finished(models, source, tmp_path_factory):
    """Returns a function of a family and a rank: the folder of a run of 8 steps, and what it printed."""
    runs = {}

    def run(family, rank=0):
        if (family, rank) not in runs:
            out = tmp_path_factory.mktemp("runs") / f"{family}-{rank}"
            lora = {"lora__rank": rank, "optimizer__lr": 1e-3} if rank else {}
            runs[family, rank] = out, train("run", "finetune", *keys(models(family), source, out, **lora))
        return runs[family, rank]

    return run


def held_out_losses(out):
    return [line["loss"] for line in read_metrics(out) if line["split"] == "val"]


@pytest.mark.parametrize(("family", "rank"), RUNS)
def test_every_family_learns_and_says_what_it_does(finished, models, family, rank):
    out, printed = finished(family, rank)
    before, *_, after = held_out_losses(out)
    assert after < before - 0.2
    assert ("chunked for gated_delta_rule" in printed) == (family not in ("ours", "fla"))
    assert f"{before:.4f} nats a token before" in printed and "sample before" in printed
    assert (out / "samples.txt").read_text().count("1+2?\n") == 3  # before, in between and after


@pytest.mark.parametrize("family", [family for family, rank in RUNS if rank])
def test_adapters_alone_are_trained_and_saved(finished, models, family):
    out, printed = finished(family, 4)
    saved = load_file(out / "checkpoints" / "best" / "adapter_model.safetensors")
    assert saved and all(".lora_A." in name or ".lora_B." in name for name in saved)
    assert any(x.any() for name, x in saved.items() if ".lora_B." in name)  # they begin with 0
    assert f"model      {type(load(models(family), None)).__name__}" in printed
    assert not list(out.glob("checkpoints/*/model*.safetensors"))
    slots = load_file(sorted(out.glob("checkpoints/step-*"))[-1] / "optimizer.safetensors")
    assert {name.rpartition("/")[0].replace(".default", "") for name in slots} == set(saved)


def loss_alone(model, tokenizer, conversations):
    """Returns the mean loss of the assistant's turns, each conversation alone, by transformers' forward."""
    total = count = 0
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(conversation["messages"], tokenize=False)
        spans = [i for i in range(len(ids)) if ids.startswith("<assistant>", i)]
        ids = torch.tensor([list(ids.encode())])
        with torch.no_grad():
            losses = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        text = bytes(ids[0].tolist()).decode()
        for span in spans:
            begin = span + len("<assistant>")
            answer = losses[begin - 1 : text.index("</>", begin) + 2]
            total, count = total + answer.sum().item(), count + len(answer)
    return total / count


@pytest.mark.parametrize(("family", "rank"), [("qwen3_next", 4), ("olmo_hybrid", 0), ("ours", 4)])
def test_others_open_the_result_and_find_the_loss_that_was_reported(models, source, tmp_path, family, rank):
    """By transformers and PEFT alone: no patch, no packing, no mask of ours."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    held_out = [row for row in rows if "messages" in row][:5]
    validation = chats.write(tmp_path / "held_out.jsonl", held_out)
    changes = {"data__validation": validation, "steps": 4, "lora__rank": rank}
    out = tmp_path / "run"
    train("run", "finetune", *keys(models(family), source, out, **changes))
    folder = sorted(out.glob("checkpoints/step-*"))[-1]
    kind = AutoPeftModelForCausalLM if rank else AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reported = held_out_losses(out)[-1]
    model = kind.from_pretrained(folder).eval()
    found = loss_alone(model, tokenizer, held_out)
    tiny_run.nudge(model, 0)  # weights that are one rounding away say what rounding does to this loss
    allowed = tiny_run.tolerance([abs(loss_alone(model, tokenizer, held_out) / found - 1)])
    assert found == pytest.approx(reported, rel=allowed) and allowed < 1e-4
    untouched = loss_alone(AutoModelForCausalLM.from_pretrained(models(family)).eval(), tokenizer, held_out)
    assert abs(untouched - reported) > 0.01
    train("export", out, "--to", tmp_path / "merged", "--checkpoint", "last")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert loss_alone(merged, tokenizer, held_out) == pytest.approx(reported, rel=allowed)
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "It answers in conversations" in card and ("import delta_trn" in card) == (family == "ours")


@pytest.mark.parametrize(
    "family", ["ours", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid"]
)
def test_packed_conversations_have_the_loss_and_gradients_that_they_have_alone(models, family):
    """In float64, but for what transformers computes in float32 always: gates, norms and rotations."""
    model = load(models(family), torch.float64).double().train()
    model.config._experts_implementation = "eager"  # grouped products have no float64
    _, loss = prepare(model, RunConfig(backend="chunked"), CPU, "float32")
    lengths, generator = (5, 64, 1, 70, 2), torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(chats.BYTES, (2, sum(lengths)), generator=generator) for _ in range(2))
    targets[torch.rand(targets.shape, generator=generator) < 0.5] = IGNORED
    places = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)

    def gradients(pieces):
        model.zero_grad()
        total = sum(loss(i, t, p) * (t != IGNORED).sum() / (targets != IGNORED).sum() for i, t, p in pieces)
        total.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    cuts = [list(x.split(lengths, 1)) for x in (ids, targets, places)]
    alone = gradients([piece for piece in zip(*cuts, strict=True) if (piece[1] != IGNORED).any()])
    packed = gradients([(ids, targets, places)])
    seen = gradients([(ids, targets, torch.arange(sum(lengths)).expand(2, -1))])
    assert packed.keys() == alone.keys()
    errors = {name: error(packed[name], x) for name, x in alone.items() if x.norm() > 1e-9}
    assert max(errors.values()) < 2**-20, max(errors.items(), key=lambda item: item[1])
    assert max(error(seen[name], alone[name]) for name in errors) > 1e-3


@pytest.mark.parametrize(("family", "rank"), [("ours", 0), ("qwen3_next", 4)])
def test_a_resumed_run_has_the_same_bits(finished, tmp_path, family, rank):
    out, _ = finished(family, rank)
    copy = tmp_path / "run"
    shutil.copytree(out, copy, symlinks=True)
    train("resume", copy, "--step", "4")
    assert tiny_run.final_state(copy) == tiny_run.final_state(out)


def test_the_same_command_again_finds_its_run_whole(finished, models, source, tmp_path, monkeypatch):
    """Paths of the command may be relative; the run has whole ones."""
    out, _ = finished("ours")
    copy = tmp_path / "run"
    shutil.copytree(out, copy, symlinks=True)
    monkeypatch.chdir(source.parent)
    arguments = keys(models("ours"), Path(source.name), copy)
    assert "all 8 steps were trained before" in train("run", "finetune", "--or-resume", *arguments)
    status, _, err = run_command("run", "finetune", "--or-resume", *arguments, "lora.rank=2")
    assert status == 2 and "holds another run: lora.rank was 0, is 2" in err


def test_two_processes_learn_what_one_does_though_their_targets_differ_in_number(models, source, tmp_path):
    """Their shares of a step have 1 to 5 targets a conversation: a mean of means would be another loss."""
    short = {"steps": 3, "sample__tokens": 1}
    arguments = keys(models("ours"), source, tmp_path / "two", batch__micro=1, **short)
    team_run.train(2, ["run", "finetune", *arguments], tmp_path / "logs")
    train("run", "finetune", *keys(models("ours"), source, tmp_path / "one", **short))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_trn.train.run.pretrained.load", _nudged)
        train("run", "finetune", *keys(models("ours"), source, tmp_path / "control", **short))
    control, distance = (
        tiny_run.metric_distance(tmp_path / name, tmp_path / "one", "loss") for name in ("control", "two")
    )
    assert distance <= tiny_run.tolerance([control]) < 1e-3
    assert load_file(tmp_path / "two/checkpoints/best/model.safetensors")


def _nudged(folder, dtype):
    model = load(folder, dtype)
    tiny_run.nudge(model, 0)
    return model


@pytest.mark.parametrize(("family", "rank"), [("ours", 0), ("qwen3_next", 4)])
def test_generate_answers_by_the_chat_template(finished, family, rank):
    out, _ = finished(family, rank)
    printed = train("generate", out, "--prompt", "1+2?", "sample.tokens=4", "sample.temperature=0")
    assert printed.startswith("1+2?\n")
    last = (out / "samples.txt").read_text().rpartition("======== step 8 ========\n")[2]
    assert printed.strip("\n") == last.strip("\n")


def test_rates_are_muP_s_for_our_models_and_ten_times_as_high_for_adapters(models, source, tmp_path):
    """m = 2: A reads the width, B and the vectors do not."""
    for rank in (0, 2):
        arguments = keys(models("ours"), source, tmp_path / f"{rank}", lora__rank=rank)
        with start(_config(arguments)) as run:
            factors = {
                name: group["factor"]
                for group in make_optimizer(run.sharding, run.config).param_groups
                for name in group["names"]
            }
        if rank:
            assert {f for name, f in factors.items() if "lora_A" in name} == {ADAPTER_RATE / 2}
            assert {f for name, f in factors.items() if "lora_B" in name} == {ADAPTER_RATE}
        else:
            assert factors["blocks.0.mlp.up_proj.weight"] == 0.5 and factors["norm.weight"] == 1


def test_a_rate_that_nobody_gave_follows_from_the_checkpoint(models, finished, tmp_path):
    assert own_rate(models("qwen3_next")) == 2e-5
    out, _ = finished("ours")
    assert own_rate(out) == 4e-3  # fine-tuned here, so as before
    folder = tmp_path / "pretrained"
    shutil.copytree(find_model(out), folder)
    state = json.loads((folder / "state.json").read_text())
    state["config"]["model"]["from"], state["config"]["optimizer"]["lr"] = None, 1e-2
    (folder / "state.json").write_text(json.dumps(state))
    assert own_rate(folder) == 1e-2 / 20


def _config(arguments):
    from delta_trn.train.recipes import recipe
    from delta_trn.train.settings.overrides import apply, parse

    return apply(recipe("finetune"), parse(arguments))


def _llama(folder):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": chats.BYTES}
    LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, **sizes)).save_pretrained(folder)
    chats.plain_bytes().save(folder)
    (folder / "chat_template.jinja").write_text(chats.CHATML)


def _small_vocabulary(folder):
    chats.make("qwen3_next").save_pretrained(folder)
    chats.plain_bytes().save(folder)
    (folder / "chat_template.jinja").write_text(chats.CHATML)


def _other_weights(folder):
    chats.save("qwen3_next", folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    config["layer_types"] = [*config["layer_types"], "linear_attention"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (None, {"model__from": "none"}, "give model.from=DIR"),
        (None, {"model__from": "nowhere"}, "nowhere is no folder; give a run's folder"),
        (lambda folder: folder.mkdir(), {}, "has no config.json"),
        (_llama, {}, "LlamaForCausalLM has no Gated DeltaNet layer"),
        (_small_vocabulary, {}, "has 259 ids, and the model 61 rows"),
        (_other_weights, {}, "cannot be loaded: .*missing"),
        (lambda folder: chats.save("ours", folder, None), {}, "has no chat template"),
        ("qwen3_5", {"batch__length": 512}, "batch.length=512 is above .*max_position_embeddings=256"),
        ("ours", {"data__loader": "stream"}, "model.from is for fine-tuning on conversations"),
        ("ours", {"distribution__mode": "fsdp"}, "fine-tuning has whole models in every process"),
        ("ours", {"model__width": 64}, "model.width=64 has no effect with model.from="),
        ("ours", {"lora__rank": 2, "lora__targets": "q_prj"}, "q_prj is no linear layer .*q_proj"),
        ("ours", {"lora__rank": 2, "lora__targets": "lm_head"}, "lm_head is no linear layer"),
        ("ours", {"lora__alpha": 2}, "lora.alpha=2.0 has no effect with lora.rank=0"),
        ("qwen3_5", {"optimizer__name": "muon"}, "muon knows the matrices of our own models"),
        ("qwen3_5", {"backend": "nki"}, "no layer of this Qwen3_5ForCausalLM can be computed"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused_before_a_folder_is_made(
    models, source, tmp_path, make, changes, message
):
    folder = tmp_path / "model" if callable(make) else models(make or "ours")
    if callable(make):
        make(folder)
    out = tmp_path / "run"
    status, _, err = run_command("run", "finetune", *keys(folder, source, out, **changes))
    assert status == 2 and err.startswith("error: ")
    assert re.search(message, err), err
    assert not (out / "config.json").exists()


def test_adapters_cannot_be_fine_tuned_before_they_are_merged(finished, source, tmp_path):
    out, _ = finished("qwen3_next", 4)
    status, _, err = run_command("run", "finetune", *keys(out, source, tmp_path / "next"))
    assert status == 2 and "merge them first, with `delta-trn export RUN --to DIR`" in err
    train("export", out, "--to", tmp_path / "merged")
    train("run", "finetune", *keys(tmp_path / "merged", source, tmp_path / "next", steps=1))


@pytest.mark.parametrize("command", ["plan", "parameters", "coord-check"])
def test_commands_that_make_new_models_refuse_one_that_is_there(models, command):
    status, _, err = run_command(command, "tiny", f"model.from={models('ours')}")
    assert status == 2 and "this command makes new models from settings" in err
