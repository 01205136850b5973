"""The order of the kernels' stages: dependencies are checked,
and every accepted order computes the same.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from delta_trn.nki_kernels import gated_delta_rule_bwd, gated_delta_rule_fwd, orders
from delta_trn.nki_kernels.gated_delta_layer import bwd, fwd
from delta_trn.nki_kernels.schedule import ALL, EVEN, ODD, Stage, list_steps, list_work, rank
from nki_simulator import record
from nki_simulator.core.machine import Machine
from nki_simulator.cost import estimate
from tools import schedule as tool

STAGES = (
    Stage("load", makes=("x",)),
    Stage("scale", needs=("x",), makes=("y",)),
    Stage("add", needs=("y",), before=("total",), makes=("total",)),
)
TABLE = (("load", EVEN, 0), ("load", ODD, 0), ("scale", ALL, 0), ("add", ALL, 1))
RULE = {"T": 168, "H": 4, "K": 32, "V": 48, "C": 32, "lanes": 4, "width": 2}
MODULES = {
    "RULE_FORWARD": (gated_delta_rule_fwd, RULE | {"every": 2}),
    "RULE_BACKWARD": (gated_delta_rule_bwd, RULE | {"every": 2, "T": 232}),
    "LAYER_FORWARD": (fwd, RULE | {"save": 1}),
    "LAYER_BACKWARD": (bwd, RULE),
}


def test_a_turn_issues_an_entry_for_the_chunk_that_is_as_far_behind():
    work = list_work(rank("kernel", STAGES, TABLE), 2)
    assert [unit[:3] for unit in work] == [
        ("load", EVEN, 0), ("load", ODD, 0), ("scale", ALL, 0),
        ("load", EVEN, 1), ("load", ODD, 1), ("scale", ALL, 1), ("add", ALL, 0),
        ("add", ALL, 1),
    ]  # fmt: skip


def test_entries_of_one_stage_share_it_in_the_order_in_which_a_chunk_meets_them():
    table = (*TABLE[:2], ("scale", ALL, 1), ("scale", ALL, 0), ("add", ALL, 1))
    assert [entry[3:] for entry in rank("kernel", STAGES, table) if entry[0] == "scale"] == [
        (2, 2),
        (1, 2),
    ]


@pytest.mark.parametrize("shares", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_shares_do_every_step_once(count, shares):
    steps = [
        step for share in range(1, shares + 1) for step in range(*list_steps(count, share, shares))
    ]
    assert steps == list(range(count))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((TABLE[0], *TABLE[2:]), "kernel: the order has no 'load' for odd bundles"),
        ((*TABLE, ("divide", ALL, 0)), "the order has 'divide', which is none of the kernel's stages"),
        ((TABLE[0], TABLE[2], TABLE[1], TABLE[3]), "'scale' .* odd bundles before it has 'x'.*'load'"),
        ((*TABLE[:2], ("add", ALL, 0), ("scale", ALL, 0)), "'add' .* before it has 'y', made by 'scale'"),
    ],
)  # fmt: skip
def test_an_order_that_breaks_a_dependency_is_refused_by_name(table, message):
    with pytest.raises(ValueError, match=message):
        rank("kernel", STAGES, table)


def test_a_sum_of_the_chunk_before_has_to_be_there():
    read = Stage("read", before=("total",), makes=("mean",))
    stages = (
        Stage("load", makes=("x",)),
        read,
        Stage("add", needs=("x", "mean"), makes=("total",)),
    )
    assert rank("kernel", stages, (("load", ALL, 0), ("read", ALL, 0), ("add", ALL, 0)))
    with pytest.raises(ValueError, match=r"'read' .* it has 'total' of the chunk before"):
        rank("kernel", stages, (("load", ALL, 0), ("read", ALL, 0), ("add", ALL, 1)))


def test_shares_that_work_in_the_same_place_wait_for_those_of_the_chunk_before():
    stages = (Stage("merge", in_place=True),)
    assert rank("kernel", stages, (("merge", ALL, 1), ("merge", ALL, 0)))
    with pytest.raises(
        ValueError, match=r"'merge' \(share 1\) .* before it has 'room' of the chunk before"
    ):
        rank("kernel", stages, (("merge", ALL, 0), ("merge", ALL, 1)))


@pytest.mark.parametrize("name", MODULES)
def test_every_order_that_is_accepted_computes_the_same_bits(name, monkeypatch):
    """So what stages need and make is all that there is to know of an order."""
    monkeypatch.setattr(Machine, "check_capacity", lambda _: None)  # chance does not know PSUM
    module, sizes = MODULES[name]
    kernel, arguments = module.example(dtype="bfloat16", **sizes)
    expected = record(kernel, *arguments, trace=False, check_source=False).outputs
    for seed in range(2):
        table = shuffle(name, module.STAGES, seed)
        monkeypatch.setattr(module, "ORDER", rank(name, module.STAGES, table))
        found = record(kernel, *arguments, trace=False, check_source=False).outputs
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def shuffle(name, stages, seed):
    """Returns the kernel's table after many random moves that keep its dependencies."""
    table, rng, moves = list(orders.ORDERS[name]), random.Random(seed), 0
    for _ in range(600):
        moved = list(table)
        stage, bundles, late = moved.pop(rng.randrange(len(moved)))
        at = rng.randrange(len(moved) + 1)
        later = 0 if stage in ("window", "taps", "silu") else rng.choice((-1, 0, 0, 1))
        moved.insert(at, (stage, bundles, max(0, late + later)))
        try:
            rank(name, stages, moved)
        except ValueError:
            continue
        table, moves = moved, moves + 1
    assert moves > 20
    return table


SMALL = {"T": 384, "H": 2, "K": 64, "V": 128, "lanes": 2, "width": 1}


def record_kernel(search, options):
    """Records the kernel's example in the order of the rule."""
    plan = tool.Plan(search)
    return tool.Trace(
        search.module, search.options | options, plan.order(plan.apply_rule(search.turns))
    )


@pytest.mark.parametrize("name", MODULES)
def test_the_tool_times_an_order_as_the_cost_model_does(name):
    search = tool.SEARCHES[name]
    target = "trn2" if name == "RULE_FORWARD" else "trn1"
    kernel, arguments = search.module.example(dtype="bfloat16", **SMALL, **search.options)
    run = record(kernel, *arguments, target=target, check_source=False)
    trace = record_kernel(search, SMALL | {"target": target})
    found = trace.time(search.module.ORDER, tool.build_timer())
    timed = replace(run.target, refused="")  # of trn2, the report says no time
    assert found[0] == pytest.approx(estimate(run.trace, timed).schedule)
    assert found[1:] == (run.sbuf_peak, run.psum_peak)
    with pytest.raises(ValueError, match="other entries than were recorded; remake it"):
        trace.time(search.module.ORDER[1:], tool.build_timer())


@pytest.mark.parametrize("name", MODULES)
def test_the_rule_that_a_search_starts_from_is_an_order(name):
    search = tool.SEARCHES[name]
    plan = tool.Plan(search)
    order = plan.order(plan.apply_rule(search.turns))
    assert rank(name, search.module.STAGES, [entry[:3] for entry in order]) == tuple(order)


def test_a_search_finds_no_order_beyond_a_bound(monkeypatch):
    """Within 40 proposals it finds a faster one, but none that takes a tenth less than that."""
    search = replace(tool.SEARCHES["RULE_FORWARD"], proposals=40, bounds=(), sizes=(SMALL,))
    monkeypatch.setitem(tool.SEARCHES, "RULE_FORWARD", search)
    timer, trace = tool.build_timer(), record_kernel(search, SMALL)
    table, (rule,), (found,) = tool.anneal("RULE_FORWARD", timer)
    time, sbuf, _ = trace.time(rank("found", search.module.STAGES, table), timer)
    assert time == found < rule
    options = search.options | SMALL
    for bound in (tool.Bound(options, sbuf=int(0.9 * sbuf)), tool.Bound(options, time=0.9 * time)):
        monkeypatch.setitem(tool.SEARCHES, "RULE_FORWARD", replace(search, bounds=(bound,)))
        with pytest.raises(RuntimeError, match="RULE_FORWARD: no order keeps the bounds"):
            tool.anneal("RULE_FORWARD", timer)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_no_order_is_judged_by_times_that_the_model_refuses(target):
    """What an order holds is known on every target."""
    assert tool.Bound({"target": target}).sbuf and tool.Bound({"target": "trn1"}, time=1.0)
    with pytest.raises(
        ValueError, match=f"by times on {target}: .*; judge it on trn1, or bound SBUF"
    ):
        tool.Bound({"target": target}, time=1.0)
    with pytest.raises(ValueError, match=f"by times on {target}"):
        replace(tool.SEARCHES["RULE_FORWARD"], sizes=({"target": target},))


@pytest.mark.parametrize("name", tool.SEARCHES)
def test_an_order_costs_what_the_search_found(name):
    """Whoever changes a stage or an order by hand makes it again."""
    trace = record_kernel(tool.SEARCHES[name], tool.SEARCHES[name].sizes[-1])
    found = trace.time(tool.SEARCHES[name].module.ORDER, tool.build_timer())
    assert found[0] == pytest.approx(orders.MADE[name][-1], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", tool.SEARCHES)
def test_the_tool_makes_the_order(name):
    table, _, found = tool.anneal(name, tool.build_timer())
    assert tuple(table) == orders.ORDERS[name]
    assert found == pytest.approx(orders.MADE[name], abs=0.01)
