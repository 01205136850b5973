"""The NKI kernels of the small layers on the simulator; float64 judges, PyTorch's layers are the baseline."""

import pytest
import torch
import torch.nn.functional as F

from delta_trn.backends import BackendRefusal
from delta_trn.backends import gated_rms_norm as gated_rms_norm_of_layers
from delta_trn.backends import short_convolution as short_convolution_of_layers
from delta_trn.models.convolution import ShortConvolution
from delta_trn.models.layers import RMSNorm
from delta_trn.models.mup import Role
from delta_trn.models.parameters import Tag
from delta_trn.models.sequence import Sequences
from delta_trn.nki_kernels import gated_rms_norm, short_convolution
from delta_trn.nki_kernels.gated_rms_norm import gated_rms_norm_bwd, gated_rms_norm_fwd
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import split
from delta_trn.nki_kernels.short_convolution import short_convolution_bwd, short_convolution_fwd
from delta_trn.nki_kernels.simulator import StrictError
from delta_trn.nki_kernels.simulator.subset import findings
from tests.support.nki_judge import DTYPES, assert_close, hbm_bytes, normal, run

KERNELS = [short_convolution_fwd, short_convolution_bwd, gated_rms_norm_fwd, gated_rms_norm_bwd]

# B, T, C, W: one token; fewer tokens than taps; one tile exactly, one token more, for forward (125) and
# backward (122); two rows; channels in uneven parts of 128 and of a bank; other numbers of taps
CONVOLUTIONS = [
    (1, 1, 32, 4), (1, 2, 32, 4), (2, 122, 48, 4), (1, 123, 48, 4), (1, 125, 32, 4), (2, 126, 32, 4),
    (1, 300, 200, 4), (1, 9, 700, 4), (1, 130, 32, 2), (1, 130, 32, 3), (1, 20, 16, 1),
]  # fmt: skip
LENGTHS = [(1, 1, 1, 2, 3, 4), (0, 5, 0, 121, 0, 4), (200, 1, 49), (125, 125), (1, 122, 122)]

# M rows, V: one row; every head size; rows that fill no partition evenly; more than one tile; V above a bank
NORMS = [(1, 64), (3, 32), (130, 96), (700, 192), (1025, 256), (37, 384), (9, 512), (5, 1100), (4100, 64)]


def convolution_inputs(B, T, C, W, dtype, hard=""):
    generator = torch.Generator().manual_seed(B + T + C + W)
    x, dy, weight = normal(generator, B, T, C), normal(generator, B, T, C), normal(generator, C, W)
    x = x * {"zero": 0.0, "large": 100.0, "small": 1e-4}.get(hard, 1.0)
    return x.to(dtype), dy.to(dtype), weight


def sequences(T, lengths):
    if lengths is None:
        return Sequences.rows(T, torch.device("cpu"))
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    return Sequences.packed(bounds, T, attention=False)


def literal_convolution(lengths, x, weight, prefix=None):
    """Tap by tap, sequence by sequence."""
    W, found = weight.shape[1], []
    for part in x.split(x.shape[1] if lengths is None else list(lengths), dim=1):
        padded = F.pad(part, (0, 0, W - 1, 0)) if prefix is None else torch.cat([prefix, part], 1)
        z = sum(padded[:, j : j + part.shape[1]] * weight[:, j] for j in range(W))
        found.append(z * torch.sigmoid(z))
    return torch.cat(found, dim=1)


def layer_convolution(lengths, x, weight):
    layer = ShortConvolution(*weight.shape, Tag(Role.VECTOR))
    return torch.func.functional_call(layer, {"weight": weight}, (x, sequences(x.shape[1], lengths)))


def outcome(function, leaves, fixed, dy, dtype, names):
    """function(*fixed, *leaves) and its gradients, in `dtype`."""
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    y = function(*fixed, *leaves)
    grads = torch.autograd.grad(y, leaves, dy.to(dtype))
    return dict(zip(names, [y.detach(), *grads], strict=True))


def check_convolution(shape, dtype, lengths=None, hard="", target="trn1"):
    x, dy, weight = convolution_inputs(*shape, dtype, hard)
    names = ("y", "dx", "dweight")
    judge = outcome(literal_convolution, [x, weight], [lengths], dy, torch.float64, names)
    honest = outcome(layer_convolution, [x, weight], [lengths], dy, torch.float32, names)
    position = None if lengths is None else sequences(shape[1], lengths).position[0].to(torch.int32)
    y = run(short_convolution_fwd, x, weight, position, lengths is not None, target=target)
    grads = run(short_convolution_bwd, dy, x, weight, position, lengths is not None, target=target)
    found = dict(zip(names, [y, *grads], strict=True))
    assert (y.dtype, grads[0].dtype, grads[1].dtype) == (dtype, dtype, torch.float32)
    assert_close(found, judge, honest, terms=2 * shape[3] + shape[0] * shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_convolution_agrees_with_float64(shape, dtype):
    check_convolution(shape, dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_convolution_agrees_with_float64(lengths):
    check_convolution((1, sum(lengths), 32, 4), torch.float32, lengths)


@pytest.mark.parametrize("hard", ["zero", "large", "small"])
def test_convolution_of_hard_inputs(hard):
    check_convolution((2, 40, 32, 4), torch.float32, hard=hard)


# one token, fewer and more tokens than the prefix, two rows, a tile of backward and a token more
CONTINUED = [(1, 1, 32, 4), (1, 2, 32, 4), (2, 5, 32, 4), (1, 122, 200, 4), (1, 123, 32, 4), (1, 130, 16, 2)]


def check_continued(shape, dtype, target="trn1"):
    """A prefix stands before x; its gradient is one more result."""
    B, _, C, W = shape
    x, dy, weight = convolution_inputs(*shape, dtype)
    prefix = normal(torch.Generator().manual_seed(1), B, W - 1, C).to(dtype)
    names = ("y", "dx", "dweight", "dprefix")

    def layer(x, weight, prefix):
        return short_convolution_of_layers(x, weight, prefix=prefix, backend="chunked")

    judge = outcome(literal_convolution, [x, weight, prefix], [None], dy, torch.float64, names)
    honest = outcome(layer, [x, weight, prefix], [], dy, torch.float32, names)
    y = run(short_convolution_fwd, x, weight, None, False, prefix, True, target=target)
    grads = run(short_convolution_bwd, dy, x, weight, None, False, prefix, True, target=target)
    found = dict(zip(names, [y, *grads], strict=True))
    assert found["dprefix"].dtype == dtype
    assert_close(found, judge, honest, terms=2 * W + shape[0] * shape[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", CONTINUED, ids=str)
def test_a_convolution_that_goes_on_agrees_with_float64(shape, dtype):
    check_continued(shape, dtype)


def test_two_calls_are_one():
    """Cut anywhere, the later call going on with the inputs of the earlier one."""
    x, _, weight = convolution_inputs(1, 40, 32, 4, torch.float32)
    whole = run(short_convolution_fwd, x, weight, None, False)
    for cut in (3, 17):
        later = run(short_convolution_fwd, x[:, cut:], weight, None, False, x[:, cut - 3 : cut], True)
        torch.testing.assert_close(later, whole[:, cut:], rtol=0, atol=1e-6)


def norm_inputs(M, V, dtype, hard=""):
    generator = torch.Generator().manual_seed(M + V)
    x, z, dy = (normal(generator, M, V) for _ in range(3))
    weight = 1 + 0.3 * normal(generator, V)
    if hard == "zero rows":
        x[::2] = 0
    x = x * {"large": 1e6, "small": 1e-4}.get(hard, 1.0)
    z = z * (30.0 if hard == "closed gates" else 1.0)
    return [t.to(dtype) for t in (x, z)] + [weight, dy.to(dtype)]


def literal_norm(eps, x, weight, z=None):
    h = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return h if z is None else h * z * torch.sigmoid(z)


def layer_norm(eps, x, weight, z=None):
    layer = RMSNorm(x.shape[-1], eps)
    return torch.func.functional_call(layer, {"weight": weight}, (x, z))


def check_norm(shape, dtype, gated=True, hard="", eps=1e-5, target="trn1"):
    x, z, weight, dy = norm_inputs(*shape, dtype, hard)
    z = z if gated else None
    names = ("y", "dx", "dweight", "dz") if gated else ("y", "dx", "dweight")
    leaves = [x, weight, z] if gated else [x, weight]
    judge = outcome(literal_norm, leaves, [eps], dy, torch.float64, names)
    honest = outcome(layer_norm, leaves, [eps], dy, torch.float32, names)
    y = run(gated_rms_norm_fwd, x, z, weight, eps, gated, target=target)
    grads = run(gated_rms_norm_bwd, dy, x, z, weight, eps, gated, target=target)
    found = {"y": y, "dx": grads[0], "dweight": grads[-1]} | ({"dz": grads[1]} if gated else {})
    assert {name: x.dtype for name, x in found.items()} == {
        name: torch.float32 if name == "dweight" else dtype for name in names
    }
    assert_close(found, judge, honest, terms=shape[0] + shape[1])


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_norm_agrees_with_float64(shape, dtype, gated):
    check_norm(shape, dtype, gated)


@pytest.mark.parametrize("hard", ["zero rows", "large", "small", "closed gates"])
def test_norm_of_hard_inputs(hard):
    check_norm((150, 96), torch.float32, hard=hard)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_agree_with_float64(dtype):
    check_convolution((1, 1024, 3072, 4), dtype)
    check_norm((6144, 256), dtype)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_later_generations(target):
    check_convolution((1, 130, 48, 4), torch.bfloat16, (60, 70), target=target)
    check_norm((300, 96), torch.bfloat16, target=target)


def _unmasked(position, packed, t0, t1, W):
    """Packed sequences see their neighbors."""
    return []


def _anticausal(seen, keep, count, W):
    """Taps in reverse: a token reads its oldest neighbor with the newest one's weight."""
    return [[part[:, W - 1 - j : W - 1 - j + count] for j in range(W)] for part in seen]


def _own_tokens_only(dz, keep, ahead, count, W, eye):
    """dx forgets what the next tile's tokens give back."""
    found = []
    for a0, a1 in split(dz.shape[1], 128):
        rows = min(count, dz.shape[0])
        behind = short_convolution.transpose_padded(dz[0:rows, a0:a1], eye, 0, count + W - 1)
        found.append([behind] * W)
    return found


@pytest.mark.parametrize(
    ("function", "fault", "lengths", "tensor"),
    [
        ("build_masks", _unmasked, (100, 50), "y"),
        ("slice_windows", _anticausal, None, "y"),
        ("transpose_returns", _own_tokens_only, None, "dx"),
    ],
)
def test_a_fault_planted_in_the_convolution_is_seen(function, fault, lengths, tensor, monkeypatch):
    monkeypatch.setattr(short_convolution, function, fault)
    with pytest.raises(AssertionError, match=rf"{tensor}: error .* above"):
        check_convolution((1, 150, 32, 4), torch.float32, lengths)


def _prefix_is_nothing(t0, W, continued):
    return 0


def test_a_forgotten_gradient_of_the_prefix_is_seen(monkeypatch):
    monkeypatch.setattr(short_convolution, "prefix_rows", _prefix_is_nothing)
    with pytest.raises(StrictError, match="is unwritten"):
        check_continued((1, 9, 32, 4), torch.float32)


def _no_projection(xt, rn, r):
    """dx keeps its part along x."""
    out = nl.ndarray((r.shape[0], r.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=out, value=0.0)
    return out


def _first_slot_for_all(out, x, r, w):
    """Every row of a partition takes the norm of its first."""
    P, slots = r.shape
    for i in range(slots):
        nisa.scalar_tensor_tensor(
            dst=out[:, i, :], data=x[:, i, :], op0=nl.multiply, operand0=r[:, 0:1], op1=nl.multiply,
            operand1=w[0:P, :],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("function", "fault", "tensor"),
    [("project", _no_projection, "dx"), ("scale_rows", _first_slot_for_all, "y")],
)
def test_a_fault_planted_in_the_norm_is_seen(function, fault, tensor, monkeypatch):
    monkeypatch.setattr(gated_rms_norm, function, fault)
    with pytest.raises(AssertionError, match=rf"{tensor}: error .* above"):
        check_norm((150, 96), torch.float32)


@pytest.mark.parametrize("kernel", KERNELS)
def test_source_is_in_the_subset_of_every_release(kernel):
    assert findings(kernel, portable=True) == ()


@pytest.mark.parametrize("backward", [0, 1])
def test_the_norm_reads_and_writes_hbm_once(backward):
    moved, least = hbm_bytes(*gated_rms_norm.example(M=1000, V=256, backward=backward))
    assert moved == least


@pytest.mark.parametrize("backward", [0, 1])
def test_the_convolution_reads_hbm_little_more_than_once(backward):
    """Overlapping tiles read 128 rows for 125 (or 122) tokens' worth; taps are read once."""
    moved, least = hbm_bytes(*short_convolution.example(T=1000, C=96, backward=backward))
    assert least < moved <= 1.06 * least


def test_sizes_that_do_not_fit_are_refused():
    x, _, weight = convolution_inputs(2, 8, 16, 40, torch.float32)
    with pytest.raises(AssertionError, match="W=40 exceeds 32 taps"):
        run(short_convolution_fwd, x, weight, None, False)
    with pytest.raises(AssertionError, match="W=1 looks back at nothing"):
        run(short_convolution_fwd, x, weight[:, :1], None, False, x[:, :0], True)
    with pytest.raises(AssertionError, match="packed sequences begin with zeros"):
        run(
            short_convolution_fwd,
            x[:1],
            weight[:, :4],
            torch.zeros(8, dtype=torch.int32),
            True,
            x[:1, :3],
            True,
        )
    with pytest.raises(AssertionError, match="B=2 rows cannot be packed"):
        run(short_convolution_fwd, x, weight[:, :4], torch.zeros(8, dtype=torch.int32), True)
    kernel, arguments = gated_rms_norm.example(M=1, V=4097, backward=1)
    with pytest.raises(AssertionError, match="V=4097 exceeds 4096"):
        run(kernel, *arguments)


def test_an_epsilon_below_the_range_of_rsqrt_is_refused():
    x, z, weight, _ = norm_inputs(3, 32, torch.float32)
    with pytest.raises(AssertionError, match="eps=1e-30 is below"):
        run(gated_rms_norm_fwd, x, z, weight, 1e-30, True)
    with pytest.raises(BackendRefusal, match="eps is 1e-30: take a larger one"):
        gated_rms_norm_of_layers(x, z, weight, eps=1e-30, backend="nki-simulator")
