"""The estimate: machine code is read right, the model behaves as said, and it still meets published
times.

Nothing is compiled here: `make compile` estimates every kernel.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.compiler import NotCompiled
from delta_trn.backends.gated_delta_rule import triton_adapter
from delta_trn.triton_kernels.sass import (
    Code,
    Instruction,
    count_unfenced,
    is_followed,
    loops,
    parse,
)
from tools.estimate import __main__ as command
from tools.estimate import (
    calibration,
    estimates,
    layers,
    machine,
    peer,
    published,
    simulate,
    work,
)
from tools.estimate.estimates import PARALLEL, SERIAL, factor

NONE = 7
# two instructions of a compiled kernel and a loop, as nvdisasm prints them
PRINTED = """
.text.kernel:
        /*0000*/                   LDG.E.128 R4, [R2.64] ;                   /* 0x0000000402047981 */
                                                                             /* 0x000ea4000c1e1d00 */
.L_x_0:
        /*0010*/              @!P0 FFMA R8, R4, R5, R8 ;                     /* 0x0000000504088223 */
                                                                             /* 0x004fc80000000008 */
        /*0020*/               @P1 BRA `(.L_x_0) ;                           /* 0x0000000000fc1947 */
                                                                             /* 0x000fea000383ffff */
"""


def instruction(
    opcode, operands="", *, predicate="", stall=1, write=NONE, read=NONE, wait=0, target=None
):
    return Instruction(opcode, operands, predicate, stall, write, read, wait, target)


EXIT = instruction("EXIT")
CODE = Code((EXIT,), 32, 0, 0, 4)


def cycles(*instructions, warps=1, programs=1, resident_registers=32, **of_work):
    """Returns the cycles that one SM takes for `programs` programs,
    without what their start takes.
    """
    code = Code((*instructions, EXIT), resident_registers, 0, 0, warps)
    job = simulate.Work(programs * machine.PROCESSORS, 1e12, **of_work)
    seconds = simulate.run(code, job).seconds
    return round(seconds * machine.CLOCK - machine.MACHINE["program_start"])


@pytest.fixture(scope="module", autouse=True)
def compiled_simulator():
    try:
        simulate.simulator()
    except NotCompiled as reason:
        pytest.skip(str(reason))


STORE, FENCE = instruction("STS.128"), instruction("FENCE.VIEW.ASYNC.S")
PRODUCT = instruction("HGMMA.64x64x16.F32.BF16")
WAIT, COPY = instruction("DEPBAR.LE"), instruction("LDGSTS.E.128")


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        (0, [STORE, FENCE, PRODUCT, PRODUCT]),
        (2, [STORE, PRODUCT, PRODUCT, FENCE]),
        # a branch jumps over the fence
        (1, [STORE, instruction("BRA", predicate="@P0", target=3), FENCE, PRODUCT]),
        # the first turn of a loop is fenced, the second is not
        (1, [FENCE, PRODUCT, STORE, instruction("BRA", predicate="@P0", target=1)]),
        (0, [FENCE, PRODUCT, STORE, instruction("BRA", predicate="@P0", target=0)]),
        # with copies, stores move tensors between layouts
        (0, [COPY, WAIT, FENCE, STORE, PRODUCT]),
        (1, [COPY, FENCE, WAIT, STORE, PRODUCT]),
    ],
)
def test_products_without_a_fence_are_counted_on_every_way(missing, code):
    assert count_unfenced((*code, EXIT)) == missing


def test_products_of_stored_tiles_need_a_fence_after_the_store():
    code = [COPY, WAIT, FENCE, STORE, PRODUCT, EXIT]
    assert (count_unfenced(tuple(code)), count_unfenced(tuple(code), stores=True)) == (0, 1)
    code.insert(4, FENCE)
    assert count_unfenced(tuple(code), stores=True) == 0


def test_control_codes_are_read_as_they_were_written():
    load, multiply, branch = parse(PRINTED)
    assert (load.opcode, load.stall, load.write, load.read, load.wait) == (
        "LDG.E.128",
        2,
        2,
        NONE,
        0,
    )
    assert (multiply.predicate, multiply.name, multiply.stall, multiply.wait) == (
        "@!P0",
        "FFMA",
        4,
        1 << 2,
    )
    assert (branch.target, branch.predicate) == (1, "@P1")
    assert loops((load, multiply, branch)) == [(1, 2)]


def test_text_that_is_no_machine_code_is_an_error():
    with pytest.raises(ValueError, match="no instructions found"):
        parse("nothing")


def test_an_early_return_is_skipped_whichever_way_the_branch_goes():
    work_is_there = (
        instruction("BRA", predicate="@P0", target=3),
        instruction("STG"),
        EXIT,
        *[instruction("FADD")] * 9,
        EXIT,
    )
    work_is_here = (
        instruction("BRA", predicate="@P0", target=11),
        *[instruction("FADD")] * 9,
        EXIT,
        instruction("STG"),
        EXIT,
    )
    guarded = (
        instruction("BRA", predicate="@P0", target=3),
        instruction("STG"),
        instruction("STG"),
        EXIT,
    )
    loop_is_there = (
        instruction("BRA", predicate="@P0", target=3),
        instruction("STG"),
        instruction("BRA", target=5),
        instruction("FADD"),
        instruction("BRA", predicate="@P1", target=3),
        EXIT,
    )
    no_loop = (*loop_is_there[:4], instruction("FADD"), EXIT)
    assert is_followed(work_is_there, 0)
    assert is_followed(loop_is_there, 0) and not is_followed(no_loop, 0)
    assert not is_followed(work_is_here, 0)
    assert not is_followed(guarded, 0)


def test_a_warp_issues_no_sooner_than_stall_counts_allow():
    assert cycles(*[instruction("IADD3", stall=5)] * 10) == 50


def test_a_warp_waits_for_the_scoreboard_of_a_load():
    load, use = instruction("LDG.E.128", write=0), instruction("FADD", wait=1)
    waited = cycles(load, use)
    assert machine.MACHINE["memory_latency"] < waited < machine.MACHINE["memory_latency"] + 60
    assert cycles(load, instruction("FADD")) < 60


def test_two_programs_hide_a_latency_that_one_cannot():
    chain = [instruction("LDG.E.128", write=0), instruction("FADD", wait=1)] * 8
    together = cycles(*chain, programs=2)
    alone = cycles(*chain, programs=2, resident_registers=256, warps=8)
    assert together < 0.6 * alone


def test_a_loop_takes_its_turns():
    body = (instruction("FADD", stall=4), instruction("BRA", predicate="@P0", stall=5, target=0))
    turn = 4 + machine.MACHINE["branch"]
    assert abs(cycles(*body, others=(10,)) - 10 * turn) <= 6


def test_a_loop_that_the_source_lacks_is_an_error():
    body = (instruction("FADD"), instruction("BRA", predicate="@P0", target=0))
    with pytest.raises(ValueError, match="1 loops without matrix products, expected at most 0"):
        cycles(*body)


def test_loops_of_few_turns_are_the_ones_unrolled():
    code = (instruction("HMMA.16816.F32"), instruction("BRA", predicate="@P0", target=0), EXIT)
    assert simulate.loop_trips(code, simulate.Work(1, 0, (2, 8, 4))) == {1: 8}


def test_matrix_products_run_at_the_rate_of_the_data_sheet():
    """64 products of 64 x 256 x 16: one takes 128 cycles of each quarter's tensor cores."""
    product = instruction("HGMMA.64x256x16.F32.BF16", "R24, gdesc[UR4], R24, gsb0")
    wait = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    taken = cycles(*[product] * 64, wait, warps=4)
    assert 64 * 128 <= taken < 64 * 128 + 100
    flops = 64 * 2 * 64 * 256 * 16 / (taken / machine.CLOCK) * machine.PROCESSORS
    assert 0.95 * 990e12 < flops < 1.0 * 990e12


def test_warps_wait_for_the_last_one_at_a_barrier():
    slow = [instruction("IADD3", stall=15)] * 4
    assert cycles(*slow, instruction("BAR.SYNC"), warps=4) >= 60 + machine.MACHINE["barrier"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code((), 255, 0, 0, 4), (2, "registers")),
        (Code((), 64, 0, 120 * 1024, 4), (1, "shared memory")),
        (Code((), 24, 0, 0, 1), (32, "programs")),
        (Code((), 16, 0, 0, 8), (8, "warps")),
    ],
)
def test_programs_on_an_sm_are_limited_by_the_scarcest(code, expected):
    assert machine.residence(code) == expected


def test_a_program_that_no_sm_holds_is_an_error():
    with pytest.raises(ValueError, match="one program exceeds an SM's registers"):
        cycles(resident_registers=255, warps=16)


@pytest.mark.parametrize(("device", "keeps"), [("h200", True), ("h100", False)])
def test_forward_keeps_what_the_adapter_keeps_on_that_device(device, keeps, monkeypatch):
    shape = replace(work.SHAPES["qwen3_next_4x8192"], tokens=2**17)
    monkeypatch.setattr(machine, "MEBIBYTES", machine.DEVICES[device][2])
    found = SimpleNamespace(total_memory=machine.MEBIBYTES * 2**20)
    monkeypatch.setattr(triton_adapter.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton_adapter.torch.cuda, "get_device_properties", lambda device: found)
    most = triton_adapter._kept_bytes.__wrapped__(triton_adapter.torch.device("cuda"))
    states = 4 * (shape.tokens // 64) * shape.HV * shape.V * (shape.K + 64) * 2
    assert work.keeps_states(shape) is keeps is (states <= most)


def test_published_times_stand_beside_an_estimate():
    assert published.compare("paper_512", 1.0, 1.0) == []
    qla, infer = published.compare("qwen3_next_4x8192", 800.0, 2000.0)
    assert (
        "FlashQLA" in qla
        and "forward 0.611 ms, 0.76 of ours; backward 2.978 ms, 1.49 of ours" in qla
    )
    assert "FlashInfer" in infer and "backward" not in infer
    assert published.PUBLISHED.keys() <= work.SHAPES.keys()


def test_a_record_of_some_shapes_keeps_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RECORDED", tmp_path / "recorded.json")
    before = {"triton": command.triton.__version__, "microseconds": {"paper_256": {"scan": 1.0}}}
    command.RECORDED.write_text(json.dumps(before))
    command.record([row("scan", 100.0)])
    after = json.loads(command.RECORDED.read_text())["microseconds"]
    assert after == {"paper_256": {"scan": 1.0}, "paper_512": {"scan": 100.0}}


def test_every_shape_has_its_launches():
    for name, shape in work.SHAPES.items():
        names = [launch.name for launch in work.launches(shape)]
        assert names[0] == "prepare" and {"scan", "reverse scan", "gradients"} <= set(names), name
        assert ("scan again" in names) != work.keeps_states(shape)
        for launch in work.launches(shape):
            assert launch.variant is None or launch.variant.signature("bf16")


def test_bytes_to_load_are_those_counted_by_hand():
    """Megabytes of 8,192 tokens of 128 channels: 2.1 in 16 bits for each head."""
    head = 8192 * 128 * 2
    chunks = head // 2  # T or P, 64 by 64 for 64 tokens; and dP, dkk
    states = 128 * 128 * 128 * 2
    row = 8192 * 4  # a number of each token in float32
    keys, values = 16 * head, 32 * head
    rule = {
        "prepare": 2 * keys + 32 * 2 * row,  # q, k; g, beta
        # k, v, T and five rows; q, P and one row for o
        "scan": keys + values + 32 * (chunks + 5 * row) + keys + 32 * (chunks + row),
        "reverse scan": 2 * keys + values + 32 * (2 * chunks + 4 * row),  # q, k, do, T, P
        "refine": 32 * row,
        # v, do, U, dY; S, dS; q, k; eight rows
        "gradients": 4 * values + 2 * 32 * states + 2 * keys + 32 * 8 * row,
        "gates": 32 * 12 * row,
    }
    keys = values
    given = 2 * keys + 2 * keys  # q, k; g in float32
    channels = {
        "prepare": given + 32 * row,
        "scan": 4 * keys + 32 * 2 * chunks,  # qg, kg, kl, v; T, P
        "scaled copies again": given + 32 * 3 * row,
        "reverse scan": 4 * keys + 32 * 2 * chunks,  # qg, kg, kl, do; T, P
        "products": 4 * keys + 2 * 32 * states,  # v, do, U, dY; S, dS
        "gradients": given + 3 * keys + 32 * 2 * chunks,  # and OS, YS, US; dP, dkk
    }
    written = {
        "prepare": 3 * keys
        + 32 * (2 * chunks + 9 * row + 128 * 128 * 4),  # qg, kg, kl; T, P, rows, last
        "scan": 2 * keys + 32 * states,  # o, U; S
        "scaled copies again": 3 * keys,
        "reverse scan": keys + 32 * states,  # dY; dS
        "products": 4 * keys + 32 * (2 * chunks + row + 128 * 128 * 4),  # OS, YS, US, dv; dP, dkk
        "gradients": 2 * keys + 2 * keys,  # dq, dk; dg in float32
    }
    kimi = work.SHAPES["kimi_1x8192"]
    assert {x.name: x.written for x in work.launches(kimi) if x.variant is not None} == written
    alone = {x.name: x.work.load_bytes for x in work.bytes_alone(kimi)}
    alone.pop("sums of gates")
    assert alone == {name: channels[name] + written[name] for name in channels}
    for shape, expected in {"qwen3_next_1x8192": rule, "kimi_1x8192": channels}.items():
        launches = [x for x in work.launches(work.SHAPES[shape]) if x.variant is not None]
        assert {x.name: x.work.load_bytes for x in launches} == expected


def test_kernels_that_differ_in_types_alone_are_estimated_apart(monkeypatch):
    """A decoded token's state in bfloat16 is half the bytes of one in float32."""
    (token,) = layers.launches("decode_16")
    types = token.variant.types
    states = " state new_state"
    halved = types | {"*fp32": types["*fp32"].replace(states, ""), "*bf16": states}
    seen = []
    monkeypatch.setattr(estimates, "compile_code", lambda variant: seen.append(variant) or CODE)
    monkeypatch.setattr(
        estimates, "of_code", lambda launch, code: estimates.Estimate("", "", False, 0)
    )
    estimator = estimates.Estimator()
    for variant in (token.variant, replace(token.variant, types=halved), token.variant):
        estimator.estimate(replace(token, variant=variant))
    assert [x.signature("bf16")["state"] for x in seen] == ["*fp32", "*bf16"]


# the short ones; `python -m tools.estimate.calibration` compares all
ROWS = [
    *(((2, 8), lengths) for lengths in ((1, 8192), (8, 1024))),
    ((16, 64), (1, 2048)),
    *(((16, 32), lengths) for lengths in ((1, 4096), (4, 2048))),
]


def compared(rows):
    kernels = calibration.load()
    return calibration.spread([calibration.compare(*row, kernels) for row in rows])


def test_the_model_still_meets_the_published_times():
    """The factors make the mean 1; what the model itself explains shows in the spread."""
    mean, deviation = compared(ROWS)
    assert 0.96 < mean < 1.04
    assert deviation < 0.035


@pytest.mark.parametrize(("name", "value"), [("MEMORY_BYTES", 3.3e12), ("CLOCK", 1.4e9)])
def test_a_wrong_machine_misses_the_published_times(monkeypatch, name, value):
    monkeypatch.setattr(machine, name, value)
    mean, deviation = compared(ROWS[:3])
    assert mean > 1.04 or deviation > 0.035


def test_the_factor_of_a_chain_grows_with_the_memory_it_uses():
    simulation = simulate.Simulation(1e-3, 1, "", 0.0, {})
    assert factor(simulation, serial=True) == SERIAL
    assert factor(replace(simulation, memory=1.0), serial=True) == PARALLEL
    assert factor(simulation, serial=False) == PARALLEL


def row(kernel, microseconds):
    return command.Row(
        "paper_512", "ours", kernel, "", False, microseconds, waits={"barriers": 1.0}
    )


def test_a_layers_kernels_have_names_of_their_own_and_their_bytes_beside_them():
    for name in layers.NAMES:
        ours, alone = list(layers.launches(name)), list(layers.bytes_alone(name))
        assert len({x.name for x in ours}) == len(ours)
        assert [(x.name, x.backward) for x in alone] == [(x.name, x.backward) for x in ours]
        assert all(
            x.variant is None and x.work.load_bytes > y.work.load_bytes > 0
            for x, y in zip(alone, ours, strict=True)
        )
    # the state of 16 sequences, float32, read and written: what a token of decoding is made of
    (token,) = layers.bytes_alone("decode_16")
    assert 1 < token.work.load_bytes / (2 * 16 * 32 * 128 * 128 * 4) < 1.01


def test_a_kernel_more_than_five_per_cent_slower_than_recorded_is_named():
    recorded = {"microseconds": {"paper_512": {"scan": 100.0, "prepare": 50.0}}}
    assert command.slower([row("scan", 104.9), row("prepare", 20.0)], recorded) == []
    (complaint,) = command.slower([row("scan", 105.1), row("prepare", 50.0)], recorded)
    assert "paper_512 scan: 105.1 us estimated, 100.0 recorded: 5.1% slower" in complaint
    (complaint,) = command.slower([row("gradients", 1.0)], recorded)
    assert "no estimate is recorded" in complaint


def test_the_table_says_that_it_is_estimated():
    lines = list(command.table([row("scan", 100.0)]))
    assert "estimated for an H200, not measured" in lines[0]
    assert any("100 ± 20" in line for line in lines)


def test_several_kernels_of_a_peer_stand_beside_one_of_ours():
    ours = replace(row("convolution", 100.0), shape="layers_1024")
    theirs = [replace(ours, of="fla", microseconds=time) for time in (30.0, 90.0)]
    lines = list(command.table([ours, *theirs]))
    assert "fla over ours: convolution 1.20 (estimated)" in lines


def test_without_a_compiler_the_command_says_what_to_do(monkeypatch, capsys):
    simulate.simulator.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(command.knobs.runtime, "interpret", False)
    with pytest.raises(SystemExit):
        command.main([])
    assert "there is no no-such-compiler; install a C++ compiler" in capsys.readouterr().err
    simulate.simulator.cache_clear()


def test_without_the_peer_the_command_says_how_to_install_it(monkeypatch, capsys):
    def missing(name):
        raise peer.PackageNotFoundError(name)

    monkeypatch.setattr(peer, "distribution", missing)
    monkeypatch.setattr(command.knobs.runtime, "interpret", False)
    with pytest.raises(SystemExit):
        command.main(["--peer", "fla"])
    assert "pip install --no-deps flash-linear-attention" in capsys.readouterr().err


def test_the_peer_of_kimi_delta_attention_runs_its_kernels_in_its_order(monkeypatch):
    """Forward and backward of chunk_kda, whose backward makes w,
    u and the states again; bytes by hand.
    """
    shape, seen = work.SHAPES["kimi_1x8192"], []

    def configurations(name, shape, *, backward):
        seen.append((backward, name))
        yield work.Launch(
            name, backward, None, peer.work(peer.CHANNELS[name], shape, {"BK": 64, "BV": 64})
        )

    monkeypatch.setattr(peer, "configurations", configurations)
    launches = [one for (one,) in peer.launches(shape)]
    again = ["w, u", "states"]
    assert [name for backward, name in seen if not backward] == [
        "diagonal blocks", "kkt, solve", *again, "outputs",
    ]  # fmt: skip
    assert [name for backward, name in seen if backward] == [
        *again, "dv, dA", "reverse states", "dq, dk, dg, dA", "gradients of blocks",
    ]  # fmt: skip
    elements = 8192 * 32 * 128  # of q, and of the decays, which are float32
    triangle = 8192 * 32 * 64 * 2
    solve = launches[1].work
    assert (
        solve.load_bytes == 2 * 2 * elements + 4 * elements + triangle / 2
        and solve.products == (2,)
    )
    assert solve.programs == 128 * 32 and len(launches) > len(seen), "norms, gates and sums follow"


def test_an_unknown_shape_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        command.main(["paper_1"])
    assert "no shape is named 'paper_1'; choose from: paper_256" in capsys.readouterr().err
