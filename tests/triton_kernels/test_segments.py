"""Long sequences with few heads: segments scanned side by side give what whole sequences give."""

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends import gated_delta_rule, kimi_delta_attention
from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter
from delta_trn.backends.gated_delta_rule.triton_time_adapter import chunk_tables, segment_tables
from delta_trn.backends.parity import channel_cases, rule_cases
from delta_trn.backends.parity.rule import verdicts
from delta_trn.triton_kernels import segments
from delta_trn.triton_kernels.launch import config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Seconds without a GPU: a seam, empty sequences, gradients of the final state alone. The rest is
# slow.
QUICK = {"seam_65": torch.float32, "packed_empty": torch.bfloat16, "final_only": torch.float32}
QUICK |= {"kimi_seam": torch.float32, "kimi_reset_packed": torch.bfloat16}
BY_NAME = rule_cases.BY_NAME | channel_cases.BY_NAME


@pytest.fixture(autouse=True)
def settings_are_reset():
    yield
    split_sequences("auto")


def split_sequences(segment):
    triton_time_adapter.SEGMENT = segment


@pytest.fixture
def launched(monkeypatch):
    """Lists the launches of `chain`: whether each was the reverse one."""
    calls = []
    original = segments.chain

    def counted(*arguments, **named):
        calls.append(named["reverse"])
        original(*arguments, **named)

    monkeypatch.setattr(segments, "chain", counted)
    return calls


def failed(name, dtype):
    return [str(v) for v in verdicts(BY_NAME[name], dtype, "triton", DEVICE) if not v.passed]


@pytest.mark.parametrize(("name", "dtype"), QUICK.items(), ids=str)
def test_segments_of_one_chunk_pass_parity(name, dtype, launched):
    split_sequences(1)
    assert not failed(name, dtype)
    assert launched == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", [name for name, case in BY_NAME.items() if not case.tags or name in QUICK]
)
@pytest.mark.parametrize("segment", [1, 2])
def test_segments_pass_parity_over_the_grid(name, segment, dtype):
    split_sequences(segment)
    assert not failed(name, dtype)


def test_parity_fails_when_segments_pass_on_a_coarse_state(monkeypatch):
    """A planted fault: A to four bits."""
    original = segments.chain

    def coarse(A, *arguments, **named):
        original((A * 16).round() / 16, *arguments, **named)

    monkeypatch.setattr(segments, "chain", coarse)
    split_sequences(1)
    assert failed("seam_65", torch.bfloat16)


def tensors(*, B=1, T=112, HV=1, K=32, V=24, N=None, dtype=torch.float32, channels=False):
    """Returns q, k, v, g, beta and initial_state, the leaves of a graph."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = (x.to(dtype) for x in (normal(B, T, 1, K), normal(B, T, 1, K), normal(B, T, HV, V)))
    g = -torch.nn.functional.softplus(normal(B, T, HV, *((K,) if channels else ())))
    beta, state = torch.sigmoid(normal(B, T, HV)), normal(N or B, HV, K, V)
    return [x.to(DEVICE).requires_grad_() for x in (q, k, v, g, beta, state)]


def run(leaves, cu_seqlens=None, function=gated_delta_rule, backend="triton"):
    """Returns o, final_state and all gradients of a sum of both."""
    o, state = function(
        *leaves[:5],
        initial_state=leaves[5],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    return [o, state, *torch.autograd.grad(o.float().square().sum() + state.square().sum(), leaves)]


@pytest.mark.parametrize(
    "function", [gated_delta_rule, kimi_delta_attention], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("cuts", [None, [0, 0, 15, 15, 80, 112, 112]], ids=["dense", "packed"])
def test_segments_repeat_their_bits_also_with_states_recomputed(function, cuts, monkeypatch):
    split_sequences(2)
    bounds = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    channels = function is kimi_delta_attention
    leaves = tensors(N=None if cuts is None else len(cuts) - 1, channels=channels)
    first = run(leaves, bounds, function)
    monkeypatch.setattr(triton_adapter, "KEPT_BYTES", 0)
    assert all(torch.equal(x, y) for x, y in zip(first, run(leaves, bounds, function), strict=True))


@pytest.mark.parametrize("cuts", [None, [0, 0, 40, 40, 70]], ids=["dense", "packed"])
def test_segments_write_every_element(cuts, poison):
    split_sequences(1)
    bounds = None if cuts is None else torch.tensor(cuts, device=DEVICE)
    leaves = tensors(T=70, HV=2, K=24, V=40, N=None if cuts is None else len(cuts) - 1)
    first, second = (run(leaves, bounds) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_segments_compile_into_one_graph(dynamic):
    split_sequences(2)
    leaves = tensors(T=70, K=16, V=16)
    compiled = torch.compile(gated_delta_rule, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert all(
        torch.equal(x, y) for x, y in zip(run(leaves), run(leaves, function=compiled), strict=True)
    )


def test_backward_refuses_segments_that_forward_did_not_cut():
    leaves = tensors()
    split_sequences(2)
    o = gated_delta_rule(*leaves[:5], backend="triton")[0]
    split_sequences(None)
    with pytest.raises(
        RuntimeError, match="cut its sequences into 2 segments and backward expects 0: leave"
    ):
        o.sum().backward()


@pytest.mark.parametrize(
    ("T", "HV", "sequences", "cut"),
    [
        (32768, 8, 1, True),  # Qwen3-Next over four devices
        (32768, 4, 1, True),
        (2048, 1, 1, True),
        (32768, 32, 1, False),  # 64 programs: three passes would take as long as one
        (1024, 6, 30, False),  # the paper's batch fills the device
        (256, 1, 1, False),  # four chunks
    ],
)
def test_automatic_segments_are_cut_only_where_most_of_the_device_would_idle(T, HV, sequences, cut):
    q = torch.empty(sequences, T, 1, 128, dtype=torch.bfloat16, device="meta")
    row = config(128, 128, itemsize=2)
    split = segment_tables(chunk_tables(q, None, row.C), HV, 128, 128, row)
    assert (split is not None) is cut
    if split is not None:
        assert (
            split.chunks.segments * split.chunks.span
            >= T
            > (split.chunks.segments - 1) * split.chunks.span
        )
