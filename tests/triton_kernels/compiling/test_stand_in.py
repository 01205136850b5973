"""A stand-in of a GPU: calls run their own code to the last launch, and torch's CUDA calls answer as
torch documents them. Each test is a process of its own, since Triton is interpreted in this one.
"""

import os
import textwrap

import pytest

from tests.support.warm import run_python

pytest.importorskip("triton", reason="the triton extra is not installed")

BEGIN = """
import torch
from delta_trn.backends import gated_delta_rule
from delta_trn.backends.gpu_stand_in.cuda import card
from delta_trn.backends.gpu_stand_in.launch_adapter import *
def call(T=64, H=1, HV=2, K=32, dtype=torch.bfloat16):
    q, v = (torch.randn(1, T, n, K, device="cuda", dtype=dtype, requires_grad=True) for n in (H, HV))
    g = torch.randn(1, T, HV, device="cuda")
    return q, gated_delta_rule(q, q, v, g, g.to(dtype), use_qk_l2norm_in_kernel=True)[0]
"""


def run(program, cache, **variables):
    """Returns what a program prints that begins as BEGIN does, without Triton's interpreter."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **variables}
    code = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    done = run_python(["-c", code], timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_a_call_at_full_size_is_noted_without_memory_and_without_compiling(tmp_path):
    program = """
    with counting() as compiled, record_launches(card((9, 0))) as found:
        q, o = call(T=1 << 20, H=16, HV=32, K=128)
        torch.autograd.grad(o.sum(), q)
        assert o.shape == (1, 1 << 20, 32, 128) and o.device == torch.device("cuda", 0) and o.is_cuda
    print(*[record.function.__name__ for record in found], len(compiled))
    """
    # the scan twice: so many states are not kept for backward
    names = ["prepare", "scan", "scan", "reverse_scan", "refine", "gradients", "gates"]
    assert run(program, tmp_path) == [*(f"{name}_kernel" for name in names), "0"]
    assert not list(tmp_path.iterdir())


def test_what_is_noted_and_compiled_is_all_that_the_call_compiles(tmp_path):
    program = """
    with record_launches(card((9, 0))) as found:
        q, o = call(H=1)
        torch.autograd.grad(o.sum(), q)
    for new in (True, False):
        assert [outcome for _, outcome in fill(found, 2)] == [new] * len(found)
    """
    launch = """
    with counting() as compiled, compile_only(card((9, 0))):
        q, o = call(H={H})
        {backward}
    print(len(compiled))
    """
    run(program, tmp_path)
    backward = "torch.autograd.grad(o.sum(), q)"
    assert run(launch.format(H=1, backward=backward), tmp_path) == ["0"]
    assert int(run(launch.format(H=2, backward=""), tmp_path)[0]) > 0, (
        "another number of heads is not in the cache"
    )


def test_a_kernel_that_cannot_be_compiled_is_told_and_the_others_are(tmp_path):
    program = """
    with record_launches(card((9, 0))) as found:
        call()
    found[0] = found[0]._replace(constants={})
    (bad, why), (good, compiled) = sorted(fill(found, 1), key=lambda pair: pair[0] is found[1])
    print(isinstance(why, Exception), compiled)
    """
    assert run(program, tmp_path) == ["True", "True"]


@pytest.mark.parametrize("locked", [True, False], ids=["in turns", "each for itself"])
def test_processes_that_share_a_cache_compile_a_kernel_once(locked, tmp_path):
    program = f"""
    import contextlib, multiprocessing
    def work(barrier, answers):
        with counting() as compiled, compile_only(card((9, 0))):
            barrier.wait()
            with compile_in_turns() if {locked} else contextlib.nullcontext():
                call()
        answers.put(len(compiled))
    fork = multiprocessing.get_context("fork")
    barrier, answers = fork.Barrier(2), fork.Queue()
    team = [fork.Process(target=work, args=(barrier, answers)) for _ in range(2)]
    for process in team: process.start()
    print(sum(answers.get() for _ in team))
    for process in team: process.join()
    """
    compiled = int(run(program, tmp_path)[0])
    assert compiled == 2 if locked else compiled > 2


def test_cuda_calls_answer_as_torch_documents_them(tmp_path):
    """Indices, streams, events, generators, memory figures; capture is refused."""
    program = """
    def refused(kind, call):
        try: call()
        except kind as error: return str(error)
        raise AssertionError("not refused")
    from delta_trn.backends import machine
    before = machine.platforms()
    with compile_only(card((8, 9))):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert machine.platforms()[0] == "cuda" and machine.pick("cuda") == torch.device("cuda", 0)
        assert torch.cuda.get_device_capability() == (8, 9)
        assert "invalid device ordinal" in refused(RuntimeError, lambda: torch.cuda.set_device(1))
        assert "CUDA devices are 0 to 0" in refused(ValueError, lambda: machine.pick("cuda:1"))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        plain = torch.cuda.Event()
        assert "recorded" in refused(ValueError, lambda: begin.elapsed_time(end))
        begin.record(); end.record(); end.synchronize()
        assert begin.elapsed_time(end) >= 0
        assert "enable_timing" in refused(ValueError, lambda: begin.elapsed_time(plain))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side): x = torch.zeros(3, device="cuda:0")
        assert x.device == torch.device("cuda", 0) and x.pin_memory() is x
        graph = lambda: torch.cuda.graph(torch.cuda.CUDAGraph())
        assert "captures no CUDA graph" in refused(RuntimeError, graph)
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        assert torch.cuda.max_memory_allocated("cuda") <= total == 24 * 2**30 >= free
        generator = torch.Generator("cuda").manual_seed(3)
        assert isinstance(generator, torch.Generator)
        torch.randn(3, device="cuda", generator=generator)
        with torch.random.fork_rng(devices=[torch.device("cuda", 0)]): torch.manual_seed(0)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert (x[None] @ x[:, None]).dtype == torch.bfloat16
    assert machine.platforms() == before and not torch.cuda.is_available()
    print("right")
    """
    assert run(program, tmp_path) == ["right"]


def test_cards_without_launches_are_refused(tmp_path):
    program = """
    for capability in ((7, 5), None):
        try: card(capability)
        except ValueError as error: print("9.0" in str(error))
    """
    if not __import__("torch").cuda.is_available():
        assert run(program, tmp_path) == ["True", "True"]
