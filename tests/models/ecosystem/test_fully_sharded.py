"""Models in bfloat16 train under either FSDP: A_log and dt_bias stay float32,
in units of their own.
"""

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from delta_trn import (
    DeltaConfig,
    DeltaForCausalLM,
    check_weights,
    patch_transformers,
    separate_numbers,
)
from delta_trn.backends.parity.judge import error
from delta_trn.models.backbone import Block
from delta_trn.models.head_numbers import NUMBERS, HeadNumbers
from delta_trn.models.mup import Role
from delta_trn.models.parameters import scaled_parameters
from tests.support import team_run, tiny_run
from tests.support.families import GATED, make, tokens

# a mean of two gradients, rounded a few times; the gradient of one process alone is far from it
ALLOWED = {torch.float32: 2**-20, torch.bfloat16: 2**-6}


def in_bfloat16(family, kind=""):
    """Returns a small model, patched if it is one of transformers; `kind` lora:
    with adapters, or float32.
    """
    if family == "ours":
        torch.manual_seed(0)
        model = DeltaForCausalLM(DeltaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2))
    else:
        model = make(family)
    model = model if kind == "float32" else model.bfloat16()
    if family != "ours":
        patch_transformers(model, backend="chunked")
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, settings) if kind == "lora" else model


def shard(model, version, units=()):
    """Shards a model as docs/transformers.md says; returns what is called in its place."""
    blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    if version == "1":
        # adapters are float32 beside frozen matrices in bfloat16: each is a unit, as PEFT's policy
        # has it
        linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        alone = {m for name, m in linear.items() if "lora_" in name}
        policy = CustomPolicy(lambda m: m in blocks or m in alone or isinstance(m, HeadNumbers))
        return FSDP1(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    for module in (*units, *blocks, model):
        fully_shard(module)
    return model


def train(model, ids):
    """Returns the loss, and every gradient by name; all processes' mean if the model is sharded."""
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, with_grads=True):
            named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
            return loss.detach(), {
                n: p.grad.clone() for n, p in named.items() if p.grad is not None
            }
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: getattr(g, "full_tensor", g.clone)() for n, g in named.items()}


def check(version, family, kind=""):
    """Compares a sharded model with the same one on each process,
    whose gradients are averaged here.
    """
    rank, plain = dist.get_rank(), in_bfloat16(family, kind)
    names, ids = list(plain.state_dict()), tokens(4, 9)[2 * rank : 2 * rank + 2]
    # FSDP2 asks only what is trained for one precision
    together = kind == "float32" or (kind == "lora" and version == "2")
    if not together:
        with pytest.raises((AssertionError, ValueError), match=r"call delta_trn\.separate_numbers"):
            train(shard(copy.deepcopy(plain), version), ids)
    sharded = copy.deepcopy(plain)
    loss, alone = train(plain, ids)
    means = {name: g.float().clone() for name, g in alone.items()}
    for mean in means.values():
        dist.all_reduce(mean)
        mean /= 2
    sharded = shard(sharded, version, () if together else separate_numbers(sharded))
    sharded_loss, gradients = train(sharded, ids)
    assert torch.equal(sharded_loss, loss)
    for name, mean in means.items():
        found = gradients[name] if name in gradients else gradients[moved(name)]
        assert found.dtype == alone[name].dtype
        assert found.dtype == torch.float32 or not name.endswith(NUMBERS)
        allowed = ALLOWED[found.dtype]
        assert error(found.float(), mean) < allowed < error(alone[name].float(), mean) / 4, name
    if version == "2":
        whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        assert sorted(whole) == sorted(sharded.state_dict()) == sorted(names)
        assert all(torch.equal(whole[name], x) for name, x in plain.state_dict().items())


def shard_on_two(arguments, log):
    """Checks each case, 'VERSION FAMILY' or 'VERSION FAMILY KIND', on one of two processes."""
    tiny_run.redirect_output(log)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in arguments:
        check(*case.split())
    sys.stdout.flush()
    os._exit(0)


def train_as(family, folder, fsdp, rate):
    """Returns the losses of two steps by transformers' Trainer on two processes: of replicas, or
    FSDP2.

    accelerate shards on accelerators alone: on CPUs it would take replicas without a word. What it
    is told of the machine is all that differs here.
    """
    AcceleratorState._reset_state()
    model = in_bfloat16(family).train()
    separate_numbers(model)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in tokens(4, 12)]
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=rate,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        fsdp=fsdp is not None,
        fsdp_config=fsdp,
    )
    assert arguments.world_size == 2
    if fsdp is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    if fsdp is not None:
        parameters = dict(trainer.model_wrapped.named_parameters())
        assert all(isinstance(p, DTensor) for p in parameters.values())
        floats = {name for name, p in parameters.items() if p.dtype == torch.float32}
        assert floats == {name for name in parameters if name.endswith(NUMBERS)} != set()
    return torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])


def compare_trainers(arguments, log):
    """Compares what Trainer logs with FSDP2, on one of two processes,
    with what it logs with replicas.
    """
    tiny_run.redirect_output(log)
    torch.set_num_threads(1)
    family, classes = arguments[0], arguments[1:]
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    fsdp |= {"transformer_layer_cls_to_wrap": classes} if classes else {}
    still, replicas, sharded = (
        train_as(family, os.path.dirname(log) + "-out", options, rate)
        for options, rate in ((None, 0.0), (None, 0.1), (fsdp, 0.1))
    )
    moved = (still - replicas).abs().max()
    assert sharded[0] == replicas[0] and moved > 0.1
    assert (sharded - replicas).abs().max() <= 0.05 * moved, (still, replicas, sharded)
    sys.stdout.flush()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["qwen3_next"], ["qwen3_5", "Qwen3_5DecoderLayer", "HeadNumbers"]]
)
def test_transformers_trainer_shards_a_model_in_bfloat16(words, tmp_path):
    team_run.train(2, words, tmp_path / "logs", compare_trainers)


QUICK = ["2 ours", "1 qwen3_5", "2 kimi_linear"]
OTHERS = [f"{family} {kind}" for family in ("ours", "qwen3_5") for kind in ("lora", "float32")]
EVERY = [f"{version} {case}" for case in (*GATED, "kimi_linear", *OTHERS) for version in "12"]


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param([*EVERY, "1 ours"], marks=pytest.mark.slow)], ids=len
)
def test_gradients_of_sharded_models_in_bfloat16_are_the_mean_of_all_processes(cases, tmp_path):
    team_run.train(2, cases, tmp_path, shard_on_two)


@pytest.mark.parametrize("family", ["ours", "qwen3_5"])
def test_separate_numbers_keep_their_names_in_files_and_change_no_result(family, tmp_path):
    model, ids = in_bfloat16(family), tokens(2, 9)
    state, (loss, gradients) = copy.deepcopy(model.state_dict()), train(model, ids)
    model.zero_grad()
    units = separate_numbers(model)
    assert units == separate_numbers(model) and len(units) == (2 if family == "ours" else 1)
    again, found = train(copy.deepcopy(model), ids)
    assert torch.equal(again, loss) and len(found) == len(gradients)
    assert all(
        torch.equal(found.get(name, found.get(moved(name))), g) for name, g in gradients.items()
    )
    assert {p.dtype for unit in units for p in unit.bfloat16().parameters()} == {torch.float32}
    kept = model.state_dict()
    assert kept.keys() == state.keys() and all(
        torch.equal(kept[name], x) for name, x in state.items()
    )
    with torch.no_grad():
        units[0].A_log.add_(1.0)
    model.load_state_dict(state)
    assert torch.equal(train(model, ids)[0], loss)
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() <= state.keys()
    assert bool(check_weights(model))


def moved(name):
    owner, _, number = name.rpartition(".")
    return f"{owner}.numbers.{number}"


def test_checkpointed_blocks_lend_separate_numbers_in_each_of_their_passes():
    model, ids = in_bfloat16("ours").train(), tokens(2, 9)
    expected = train(model, ids)[1]
    model.zero_grad()
    separate_numbers(model)
    model.gradient_checkpointing_enable()
    found = train(model, ids)[1]
    assert all(
        torch.equal(found.get(name, found.get(moved(name))), g) for name, g in expected.items()
    )


def test_accelerate_and_mup_find_separate_numbers():
    model = in_bfloat16("ours")
    units = separate_numbers(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert [m for m in model.modules() if policy(m) and not isinstance(m, Block)] == units
    rows = scaled_parameters(model, optimizer="adamw", lr=1.0, weight_decay=0.1)
    assert [row.role for row in rows if row.name.endswith(NUMBERS)] == [Role.SCALAR] * 4


def test_a_model_without_numbers_is_refused():
    with pytest.raises(ValueError, match="Linear has no layer with A_log and dt_bias"):
        separate_numbers(torch.nn.Linear(2, 2))
