"""The plan's arithmetic agrees with a real model's parameters and with counts by hand."""

import json
from functools import partial

import pytest

from delta_trn.backends.nki_runtime_adapter import count_instructions, estimate_kernels
from delta_trn.models import DeltaForCausalLM
from delta_trn.train.neuron import step_time
from delta_trn.train.neuron.instructions import extrapolate, run_readout
from delta_trn.train.parallel import plan
from delta_trn.train.recipes import recipe
from delta_trn.train.run.model import model_config
from delta_trn.train.settings.overrides import apply
from delta_trn.train.settings.schema import RunConfig
from tests.support import tiny_models, tiny_run


def config(**changes: str) -> RunConfig:
    return apply(recipe("tiny"), {key.replace("__", "."): value for key, value in changes.items()})


def test_planned_parameter_counts_are_those_of_the_model():
    c = config()
    size = plan.size_of(c)
    model = DeltaForCausalLM(model_config(c, rows=320))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    # every matrix except the convolution's taps multiplies every token, the tied embedding as the readout
    taps = sum(p.numel() for n, p in model.named_parameters() if n.endswith("conv.weight"))
    assert size.matrices == sum(p.numel() for p in model.parameters() if p.dim() == 2) - taps
    untied = plan.size_of(config(model__tie_word_embeddings="false"))
    assert untied.matrices == size.matrices
    assert untied.parameters == size.parameters + 320 * c.model.width
    assert tiny_models.VOCABULARY != 320, "the plan asks the recipe for its vocabulary"


def test_planned_flops_grow_with_tokens_and_exceed_six_per_parameter():
    size = plan.size_of(config())
    assert plan.step_flops(size, 200) == 2 * plan.step_flops(size, 100)
    assert plan.step_flops(size, 100) > 6 * 100 * size.matrices


@pytest.mark.parametrize(("mode", "sent", "kept"), [("ddp", 2, 16), ("zero1", 3, 10), ("fsdp", 5, 4)])
def test_bytes_sent_and_kept_by_four_workers_match_counts_by_hand(mode, sent, kept):
    size = plan.size_of(config())
    assert plan.collective_bytes(size, mode, 4, 2) == sent * 4 * size.parameters * 3 / 4
    assert plan.collective_bytes(size, mode, 1, 2) == 0
    gathers = {"ddp": 0, "zero1": 1, "fsdp": 4}[mode]
    saved = plan.collective_bytes(size, mode, 4, 2) - plan.collective_bytes(size, mode, 4, 2, "bf16")
    assert saved == gathers * 2 * size.blocks * 3 / 4 and size.blocks == size.matrices - 320 * 32
    assert plan.state_bytes(size, mode, 4) == kept * size.parameters


def test_the_plan_says_where_scaling_stops_and_why():
    c = apply(recipe("gdn_mup_adamw"), {"model.width": "1536", "data.tokenizer": "gpt2"})
    rows = plan.rows(c, plan.size_of(c))
    assert len(rows) == len(plan.WORKERS) * len(plan.COUNTS)
    h100 = [row for row in rows if row.worker == "h100"]
    assert h100[0].limit == "compute" and h100[0].efficiency == 1
    assert "workers without a sequence" in h100[-1].limit
    assert h100[-1].efficiency < 0.5
    huge = apply(c, {"model.width": "12288"})
    assert "memory" in plan.rows(huge, plan.size_of(huge))[0].limit


def test_the_plan_command_says_that_its_numbers_are_computed():
    output = tiny_run.train("plan", "tiny")
    assert output.startswith("COMPUTED, not measured") and "h100" in output
    assert "\nESTIMATED, not measured: a step on 32 NeuronCores of Trn1" in output
    rows = json.loads(tiny_run.train("plan", "tiny", "--json", "--cores", "2"))
    assert {row["workers"] for row in rows} == set(plan.COUNTS)
    step = [row for row in rows if "part" in row]
    assert {row["workers"] for row in step} == {2} and all(0 < row["low_s"] <= row["high_s"] for row in step)
    assert "part" not in tiny_run.train("plan", "tiny", "--json", "--cores", "0")


def test_a_step_on_trn1_adds_up_from_its_layers_and_sequences():
    c = config(batch__sequences="8")
    one = {part.name: part for part in step_time.parts(c, plan.size_of(c), 8)}
    assert list(one) == [
        "matmuls", "gated norm", "layer", "readout", "elementwise", "optimizer, all-reduce",
    ]  # fmt: skip
    assert one["layer"].low < one["layer"].high
    assert one["matmuls"].high / one["matmuls"].low == pytest.approx(79 / 45)
    four = {part.name: part for part in step_time.parts(c, plan.size_of(c), 2)}
    deep = config(batch__sequences="8", model__layers=str(2 * c.model.layers))
    deeper = {part.name: part for part in step_time.parts(deep, plan.size_of(deep), 8)}
    readouts = []
    for micro in ("1", "4"):
        batch = config(batch__sequences="8", batch__micro=micro)
        readouts.append(step_time.parts(batch, plan.size_of(batch), 2)[3])
    assert readouts[0].high > readouts[1].high, "fewer calls of more tokens move less of the weight"
    for name in ("gated norm", "layer", "elementwise"):
        assert four[name].high == pytest.approx(4 * one[name].high)
        assert deeper[name].high == pytest.approx(2 * one[name].high)
    assert one["layer"].high == c.model.layers * step_time.kernel_seconds(c)["layer"]["issue"]


def test_a_readout_that_the_kernel_does_not_take_is_estimated_as_pytorchs():
    c = config(model__width="1056", batch__sequences="8")
    size = plan.size_of(c)
    assert step_time.readout_seconds(c, 32) is None
    matmuls, readout = step_time.products(c, size, 2)
    flops = 24 * size.matrices * 2 * c.batch.length
    assert matmuls.low == pytest.approx(flops / step_time.MATMULS[0]) and readout.low < readout.high


def test_instructions_and_time_of_a_large_vocabulary_follow_from_small_ones():
    tokens, rows = 32, 512 * 9 + 40

    def measure(words: int) -> list[float]:
        work = partial(run_readout, config(precision="bf16"), tokens, words, training=True)
        ((_, times),) = estimate_kernels(work)
        return [count_instructions(work), times["issue"]]

    count, seconds = extrapolate(measure, rows, 32)
    assert [count, seconds] == [measure(rows)[0], pytest.approx(measure(rows)[1], rel=0.03)]


def test_the_plan_says_why_there_is_no_estimate_for_a_model_that_the_kernels_do_not_take():
    output = tiny_run.train("plan", "tiny", "model.head_dim_k=512")
    assert "No estimate of a step on Trn1" in output and "512" in output
