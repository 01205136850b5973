"""Nothing is copied on the way to a kernel: q, k and v are read where they lie,
and launches are counted.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the triton extra is not installed")

from delta_trn.backends.dispatch import default_backend
from delta_trn.backends.gated_delta_rule import triton_adapter, triton_time_adapter
from delta_trn.backends.gated_delta_rule.contract import Rule, Step
from delta_trn.backends.gated_delta_rule.once import once
from delta_trn.backends.kimi_delta_attention import triton_adapter as channels_adapter
from delta_trn.backends.rows import find_whole
from delta_trn.models.cache import LayerCache
from delta_trn.models.config import DeltaConfig
from delta_trn.models.gated_deltanet import GatedDeltaNet
from delta_trn.models.kimi_delta_attention import KimiDeltaAttention
from delta_trn.models.layers import consecutive_parts
from delta_trn.models.sequence import Sequences, _is_captured
from delta_trn.triton_kernels.launch import config
from tests.support.planted_bugs import Bug, planted
from tests.triton_kernels.test_recompilation import KERNELS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Hopper's kernels count as those that they stand for
HOPPERS = {
    "prepare.prepare": "fwd.prepare",
    "prepare_hopper.prepare": "fwd.prepare",
    "gradients_hopper.gradients": "bwd.gradients",
}
ROW = config(96, 16, itemsize=2, rule="kimi_")
on_hopper = pytest.mark.skipif(
    not ROW.prepare.gluon or ROW.dot == "interpreted", reason="Gluon runs compiled, on Hopper"
)


class OnGpu:
    """Stands for a tensor on a GPU, as `once` and `_is_captured` ask one."""

    is_cuda, device, _version = True, torch.device("cuda", 0), 0

    def is_inference(self):
        return False


def test_what_follows_from_boundaries_is_made_once_a_stream_and_anew_in_a_graph(monkeypatch):
    now, made, x = SimpleNamespace(captured=False, stream=1), [], OnGpu()
    stream = lambda device: SimpleNamespace(cuda_stream=now.stream)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captured)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    for now.captured, now.stream, count in (
        (False, 1, 1),
        (False, 1, 1),  # kept
        (False, 2, 2),  # what another stream made may not be there yet
        (True, 2, 3),  # the graph's own launches follow an x that changes
        (True, 2, 4),
        (False, 1, 4),
    ):
        once(x, "table", lambda: made.append(0))  # type: ignore[arg-type]
        assert len(made) == count and _is_captured(x) is now.captured  # type: ignore[arg-type]


class Launches(TorchDispatchMode):
    """Counts what a device would run: kernels,
    and PyTorch's operations that are neither views nor memory.
    """

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        schema, name = function._schema, function._schema.name.removeprefix("aten::")
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        if not view and name not in ("empty", "empty_like", "new_empty", "_unsafe_view"):
            self.count[name] += 1
        return function(*args, **(kwargs or {}))

    def during(self, function):
        """Returns what function() launches."""
        self.count.clear()
        with self:
            function()
        return dict(self.count)


@pytest.fixture
def launches(monkeypatch):
    """Gives the counts; kernels are counted and not run."""
    mode = Launches()

    class Counted:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **named: mode.count.update([self.name])

    for module, name in KERNELS:
        place = f"{module.__name__.split('.')[-1].removeprefix('gated_delta_rule_')}.{name}"
        place = place.removesuffix("_kernel")
        place = HOPPERS.get(place, place)
        monkeypatch.setattr(module, name, Counted(place))
    with default_backend("triton"):
        yield mode


def layer_of(dtype=torch.bfloat16):
    config = DeltaConfig(hidden_size=64, num_heads=2, num_v_heads=4, head_dim_k=16, expand_v=2.0)
    layer = GatedDeltaNet(config).to(dtype)
    for x in layer.parameters():
        x.data.normal_()
    return layer


# forward reads the convolution's weight transposed; joint projections put weights side by side,
# twice
FORWARD = {
    "mm": 4, "cat": 2, "clone": 1, "short_convolution.forward": 1, "fwd.prepare": 1, "fwd.scan": 1,
    "rms_norm.forward": 1,
}  # fmt: skip
# sums are of a norm's and taps' weight, A_log and dt_bias; adds, of x's gradients
BACKWARD = {
    "mm": 8,
    "clone": 2,
    "sum": 4,
    "_to_copy": 2,
    "add": 2,
    "reverse.reverse_scan": 1,
    "refine.refine": 1,
    "bwd.gradients": 1,
    "bwd.sum_heads": 2,
    "rms_norm.backward": 1,
    "short_convolution.backward": 1,
}


def dense_layer(launches):
    """Requires what forward and backward of a layer launch."""
    layer, x = layer_of(), torch.randn(2, 70, 64, dtype=torch.bfloat16, requires_grad=True)
    y = []
    assert launches.during(lambda: y.append(layer(x, Sequences.rows(70, x.device)))) == FORWARD | {
        "arange": 1
    }
    assert launches.during(lambda: y[0].backward(torch.ones_like(x))) == BACKWARD | {"ones_like": 1}


def test_a_layer_in_training_launches_these_kernels_alone(launches):
    dense_layer(launches)


def test_a_layer_on_documents_launches_two_masks_and_a_join_more(launches):
    """A document's first token gets another decay, whose gradient is joined with beta's."""
    layer, x = layer_of(), torch.randn(1, 70, 64, dtype=torch.bfloat16, requires_grad=True)
    documents = Sequences.documents(torch.arange(70)[None] % 40, attention=False)
    y = []
    forward = launches.during(lambda: y.append(layer(x, documents)))
    assert forward == FORWARD | {"masked_fill": 1}
    backward = launches.during(lambda: y[0].backward(torch.ones_like(x)))
    assert backward == BACKWARD | {"masked_fill": 1, "cat": 1, "ones_like": 1}


def test_a_decoded_token_copies_the_window_of_its_convolution_alone(launches):
    """The convolution copies its window; the rule copies nothing."""
    layer, cache = layer_of(), LayerCache()
    with torch.no_grad():
        x = torch.randn(3, 71, 64, dtype=torch.bfloat16)
        layer(x[:, :70], Sequences.rows(70, x.device), cache)
        last = Sequences.rows(1, x.device, offset=70)
        found = launches.during(lambda: layer(x[:, 70:], last, cache))
    kernels = {"short_convolution.forward": 1, "step.step": 1, "rms_norm.forward": 1}
    assert found == kernels | {"mm": 7, "cat": 4, "clone": 3}


def call_of(cu_seqlens, layout="one tensor", *, B=1, T, H, HV, K, V, dtype=torch.bfloat16):
    """Returns a call whose tensors are parts of wider ones, and the same with copies of them."""
    generator = torch.Generator().manual_seed(T)

    def normal(*shape, dtype=dtype):
        return torch.randn(B, T, *shape, generator=generator).to(dtype).to(DEVICE)

    sizes = (H * K, H * K, HV * V)
    gates = 4 * normal(2 * HV, dtype=torch.float32)  # some betas near 0
    if layout == "one tensor":
        q, k, v = normal(sum(sizes)).split(sizes, -1)
        g, beta = gates.split(HV, -1)
    else:  # every tensor has a distance of its own
        q = normal(sizes[0] + 8)[..., 8:]
        v, k = normal(sum(sizes[1:]) + 16)[..., 16:].split(sizes[:0:-1], -1)
        g, beta = gates[..., HV:], 4 * normal(3 * HV, dtype=torch.float32)[..., :HV]
    options: dict[str, Any] = {
        "A_log": torch.zeros(HV, device=DEVICE),
        "dt_bias": torch.ones(HV, device=DEVICE),
    }
    states = len(cu_seqlens) - 1 if cu_seqlens is not None else B
    state = torch.randn(states, HV, K, V, generator=generator).to(DEVICE)
    heads: Any = (q.unflatten(2, (H, K)), k.unflatten(2, (H, K)), v.unflatten(2, (HV, V)), g, beta)
    options |= {"initial_state": state, "cu_seqlens": cu_seqlens, "output_final_state": True}
    options |= {"scale": K**-0.5, "beta_max": 2.0, "l2norm": True}
    return Rule(*heads, **options), Rule(*(x.contiguous() for x in heads), **options)


def outcome(call, adapter: Any = triton_adapter):
    o, state, saved = adapter.forward(call, save=True)
    assert state is not None
    do, dstate = torch.cos(o.float()).to(o.dtype), torch.cos(state)
    return [o, state, *adapter.backward(do, dstate, call, saved)]


def test_tables_of_packed_sequences_are_made_once(launches, monkeypatch):
    """Where boundaries are kept: on a CPU nothing is, so that is switched on here."""
    monkeypatch.setitem(once.__globals__, "_keeps", lambda x: True)
    cuts = torch.tensor([0, 20, 20, 70])
    call, _ = call_of(cuts, T=70, H=1, HV=1, K=16, V=16)
    first = launches.during(lambda: outcome(call))
    later = launches.during(lambda: outcome(call))
    kernels = {
        "fwd.prepare": 1,
        "fwd.scan": 1,
        "reverse.reverse_scan": 1,
        "refine.refine": 1,
        "bwd.gradients": 1,
    }
    sums = {"sum": 2, "new_zeros": 1}  # of gates' gradients; what rounding takes of first states
    own = {"cos": 2, "_to_copy": 2}  # this test's
    assert later == kernels | sums | own
    assert sum(first.values()) == sum(later.values()) + 18
    with torch.inference_mode():
        call, _ = call_of(cuts.clone(), T=70, H=1, HV=1, K=16, V=16)
        assert launches.during(lambda: triton_adapter.forward(call, save=False))["cumsum"] == 1


@patch.dict(once.__globals__, {"_keeps": lambda x: True})
def tables_follow():
    """Requires new tables for boundaries whose numbers were overwritten since the last call."""
    cuts = torch.tensor([0, 20, 70], device=DEVICE)
    q = torch.zeros(1, 70, 1, 16, device=DEVICE)
    for middle in (20, 65):
        cuts[1] = middle
        made = triton_time_adapter.chunk_tables(q, cuts, 64)
        assert made.offsets.tolist() == [0, -(-middle // 64), 1 + -(-middle // 64)]
        assert triton_time_adapter.chunk_tables(q, cuts, 64).start is made.start


def test_tables_follow_what_is_written_to_the_boundaries():
    tables_follow()


def layouts_agree(**sizes):
    """Requires the bits of copies from parts of wider tensors,
    and gradients that lie as their tensors do.
    """
    for layout in ("one tensor", "others"):
        parts, copies = call_of(
            sizes.get("cuts"), layout, **{n: x for n, x in sizes.items() if n != "cuts"}
        )
        found, expected = outcome(parts), outcome(copies)
        for name, x, y in zip(
            ("o", "state", *"qkvgb", "A", "dt", "dS"), found, expected, strict=True
        ):
            assert torch.equal(x, y), f"{layout}: {name} differs by {(x - y).abs().max()}"
        assert (find_whole(found[2:5]) is not None) == (layout == "one tensor")
        assert (find_whole(found[5:7]) is not None) == (layout == "one tensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 2, "T": 35, "H": 2, "HV": 2, "K": 16, "V": 24},
        {"T": 35, "H": 2, "HV": 4, "K": 16, "V": 32},
        {"T": 17, "H": 1, "HV": 3, "K": 24, "V": 16},
        {"T": 40, "H": 1, "HV": 1, "K": 16, "V": 16, "cuts": (0, 0, 33, 40)},
        {"B": 2, "T": 1, "H": 1, "HV": 2, "K": 16, "V": 16},
    ],
    ids=["dense", "pairs", "triples", "packed", "one token"],
)
def test_parts_of_wider_tensors_give_the_bits_of_copies(sizes, dtype):
    if "cuts" in sizes:
        sizes = sizes | {"cuts": torch.tensor(sizes["cuts"], device=DEVICE)}
    if sizes["T"] == 1 and sizes["B"] > 1:
        parts, copies = call_of(None, **sizes, dtype=dtype)
        assert all(torch.equal(x, y) for x, y in zip(outcome(parts), outcome(copies), strict=True))
        return
    layouts_agree(**sizes, dtype=dtype)


def test_segments_of_parts_give_the_bits_of_copies(monkeypatch):
    monkeypatch.setattr(triton_time_adapter, "SEGMENT", 1)
    layouts_agree(T=70, H=1, HV=1, K=16, V=16)


def tokens_agree():
    """Requires that a token's vectors are read where they lie."""
    for layout in ("one tensor", "others"):
        call, _ = call_of(None, layout, B=3, T=2, H=1, HV=2, K=16, V=16)
        token: Any = {name: getattr(call, name)[:, 1] for name in ("q", "k", "v", "g", "beta")}
        options: Any = {"state": call.initial_state, "A_log": call.A_log, "dt_bias": call.dt_bias}
        options |= {"beta_max": 2.0, "l2norm": True}
        found = triton_adapter.step(Step(**token, **options))
        token = {name: x.contiguous() for name, x in token.items()}
        expected = triton_adapter.step(Step(**token, **options))
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_parts_of_a_token_give_the_bits_of_copies():
    tokens_agree()


def joins():
    """Requires that gradients are joined in the order of their tensors, wherever they lie."""
    x = torch.randn(2, 3, 12, requires_grad=True)
    whole = torch.randn(2, 3, 12)
    ordered, swapped, apart = (
        whole.split([4, 8], -1),
        whole.split([8, 4], -1)[::-1],
        [y.clone() for y in whole.split([4, 8], -1)],
    )
    for gradients in (ordered, swapped, apart):
        (dx,) = torch.autograd.grad(consecutive_parts(x, (4, 8)), x, gradients)
        assert torch.equal(dx, torch.cat(gradients, -1))
        assert (dx.data_ptr() == whole.data_ptr()) == (gradients is ordered)
    whole.requires_grad_()
    (dx,) = torch.autograd.grad(
        consecutive_parts(x, (4, 8)), x, whole.split([4, 8], -1), create_graph=True
    )
    assert torch.equal(torch.autograd.grad(dx.sum(), whole)[0], torch.ones(2, 3, 12))


def test_gradients_are_joined_where_they_lie_or_by_a_copy():
    joins()


@pytest.mark.parametrize(
    ("place", "line", "mistake", "check"),
    [
        ("backends.rows:as_rows", "has_rows(x, leading)", "x.is_contiguous()", dense_layer),
        ("backends.rows:empty_like_parts", "if whole is None", "if True", dense_layer),
        ("models.layers:Parts.backward", "else find_whole(parts)", "else None", dense_layer),
        ("backends.rows:find_whole", "x.storage_offset() == place and", "", joins),
        ("models.layers:Parts.backward", "None if again or", "None if", joins),
        (
            "backends.gated_delta_rule.once:once",
            "_MADE[x][0] != x._version",
            "False",
            tables_follow,
        ),
        ("triton_kernels.gated_delta_rule_step:step_kernel", "i_x * KR", "i_x * QR", tokens_agree),
        *(
            (f"triton_kernels.gated_delta_rule_{place}_kernel", line, mistake, None)
            for place, line, mistake in (
                ("fwd:prepare", "o_c * BR", "o_c * GR"),
                ("fwd:scan", "t * VR", "t * (HV * V)"),
                ("reverse:reverse_scan", "k + t * KR", "k + t * QR"),
                ("bwd:gradients", "start * DKR", "start * (H * K)"),
                ("bwd:gradients", "o_c[:, None] * VR", "o_c[:, None] * (HV * V)"),
            )
        ),
    ],
)
def test_a_planted_bug_is_found(place, line, mistake, check, request):
    launches = (request.getfixturevalue("launches"),) if check is dense_layer else ()
    sizes = {"B": 2, "T": 35, "H": 1, "HV": 1, "K": 16, "V": 24, "dtype": torch.float32}
    with (
        planted(Bug(place, place, line, mistake, "")),
        pytest.raises((AssertionError, RuntimeError)),
    ):
        check(*launches) if check else layouts_agree(**sizes)


def kimi_layer(launches, packed):
    """Returns what forward and backward of a layer with decays per channel launch."""
    config = DeltaConfig(
        hidden_size=64, num_heads=2, num_v_heads=4, head_dim_k=16, expand_v=2.0,
        mixer="kimi_delta_attention", decay_bound=-5.0,
    )  # fmt: skip
    layer = KimiDeltaAttention(config).bfloat16()
    for x in layer.parameters():
        x.data.normal_()
    x = torch.randn(1, 70, 64, dtype=torch.bfloat16, requires_grad=True)
    sequences = Sequences.rows(70, x.device)
    if packed:
        sequences = Sequences.documents(torch.arange(70)[None] % 40, attention=False)
    y = []
    forward = launches.during(lambda: y.append(layer(x, sequences)))
    return forward, launches.during(lambda: y[0].backward(torch.ones_like(x)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_with_decays_per_channel_copies_no_token(packed, launches):
    forward, backward = kimi_layer(launches, packed)
    assert forward == {
        "mm": 5, "addmm": 1, "short_convolution.forward": 1, "fwd.prepare": 1, "fwd.scan": 1,
        "rms_norm.forward": 1,
        "cat": 2, "clone": 1,  # of weights
    }  # fmt: skip
    assert backward == {
        "ones_like": 1, "mm": 12, "rms_norm.backward": 1, "fwd.copies": 1, "bwd.products": 1,
        "reverse.reverse_scan": 1, "bwd.gradients": 1, "bwd.sum_heads": 2,
        "short_convolution.backward": 1,
        "sum": 5, "_to_copy": 2, "clone": 2,  # of parameters' gradients
        "cat": 1,  # of both gates' gradients of rank V
        "add": 2,  # of x's gradients
    }  # fmt: skip


def channels_agree(cuts=None, lower_bound: float | None = -5.0, HV=2):
    """Requires of Kimi Delta Attention the bits of copies, from parts of wider tensors.

    Bounded decays are those that Hopper's kernels take; with one value head for each key head,
    their gradients are those through the norms, too.
    """
    sizes: dict[str, Any] = {"T": 70, "H": 1, "HV": HV, "K": 16, "V": 24, "dtype": torch.bfloat16}
    for layout in ("one tensor", "others"):
        parts, copies = call_of(cuts, layout, **sizes)
        generator = torch.Generator().manual_seed(0)
        wide = torch.randn(1, 70, HV * 16 + 16, generator=generator).to(DEVICE)
        g = wide[..., 16:].unflatten(2, (HV, 16))
        bias = torch.ones(HV, 16, device=DEVICE)
        calls = [
            replace(call, g=y, dt_bias=bias, lower_bound=lower_bound)
            for call, y in ((parts, g), (copies, g.contiguous()))
        ]
        found, expected = (outcome(call, channels_adapter) for call in calls)
        for name, x, y in zip(
            ("o", "state", *"qkvgb", "A", "dt", "dS"), found, expected, strict=True
        ):
            assert torch.equal(x, y), f"{layout}: {name} differs by {(x - y).abs().max()}"
        assert (find_whole(found[2:5]) is not None) == (layout == "one tensor")


@pytest.mark.parametrize("HV", [1, 2])
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["free", "bounded"])
@pytest.mark.parametrize("cuts", [None, (0, 5, 5, 70)], ids=str)
def test_parts_of_wider_tensors_give_the_bits_of_copies_with_decays_per_channel(
    cuts, lower_bound, HV
):
    channels_agree(None if cuts is None else torch.tensor(cuts, device=DEVICE), lower_bound, HV)


def strides_are_found(place, line, mistake, lower_bound, HV=2):
    place = f"triton_kernels.kimi_delta_attention.{place}"
    with planted(Bug(place, place, line, mistake, "")), pytest.raises(AssertionError):
        channels_agree(None, lower_bound, HV)


@pytest.mark.parametrize(
    ("place", "line", "mistake"),
    [
        ("fwd:prepare_kernel", "p_q + o_c[:, None] * QR", "p_q + o_c[:, None] * (H * K)"),
        ("fwd:prepare_kernel", "o_c * BR", "o_c * HV"),
        ("fwd:copies_kernel", "o_c[:, None] * KR", "o_c[:, None] * QR"),
        ("bwd:products_kernel", "o_c[:, None] * DVR", "o_c[:, None] * (HV * V)"),
        (
            "bwd:gradients_kernel",
            "i_h * K + o_c[:, None] * GR",
            "i_h * K + o_c[:, None] * (HV * K)",
        ),
    ],
)
def test_a_planted_bug_of_strides_with_decays_per_channel_is_found(place, line, mistake):
    strides_are_found(place, line, mistake, None)


@on_hopper
@pytest.mark.parametrize(
    ("place", "line", "mistake", "HV"),
    [
        ("prepare_hopper:prepare_kernel", "o_t[:, None] * QR", "o_t[:, None] * (H * K)", 2),
        ("prepare_hopper:prepare_kernel", "o_t[:, None] * KR", "o_t[:, None] * QR", 2),
        ("prepare_hopper:prepare_kernel", "o_t[:, None] * GR", "o_t[:, None] * (HV * K)", 2),
        ("prepare_hopper:prepare_kernel", "o_c * BR", "o_c * HV", 2),
        ("gradients_hopper:gradients_kernel", "p_q, QR, length", "p_q, H * K, length", 2),
        ("gradients_hopper:gradients_kernel", "k + start * KR + p_q", "k + start * QR + p_q", 2),
        ("gradients_hopper:gradients_kernel", "other * GR", "other * (HV * K)", 2),
        ("gradients_hopper:gradients_kernel", "i_h + o_c * BR", "i_h + o_c * HV", 2),
        ("gradients_hopper:gradients_kernel", "start * DQR + i_h", "start * (H * K) + i_h", 1),
        ("gradients_hopper:gradients_kernel", "SLICES, QR, DQR", "SLICES, QR, H * K", 1),
        ("gradients_hopper:gradients_kernel", "SLICES, KR, DKR", "SLICES, QR, DKR", 1),
    ],
)
def test_a_planted_bug_of_strides_in_hoppers_kernels_is_found(place, line, mistake, HV):
    strides_are_found(place, line, mistake, -5.0, HV)
