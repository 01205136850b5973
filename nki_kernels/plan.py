"""Decides how the NKI kernels cut their work, in plain numbers; this module imports no NKI.

A kernel call takes all sequences of a micro-batch, since a host records the calls of every layer
one by one. The rule alone, decoding and the residual update are cut by `LANE_CHUNKS`, `STEP_HEADS`
and `TOKENS`, as the kernels are unrolled. Inside a call of the gated delta rule:

    lane      one value head of one sequence
    bundle    up to four lanes of one sequence, whose small matrices lie side by side on the free
              axis, so that one instruction serves them all
    wave      the bundles whose instructions are issued in turn, so that one waits while another
              computes
"""

from dataclasses import dataclass, replace

PARTITIONS = 128
BANK = 512  # float32 numbers in one PSUM bank of a partition, the most that one product writes

CHUNK = 128  # tokens per chunk
EVERY = (
    2  # chunks between kept states: 1.2 times the least bytes per step instead of 1.5, in bfloat16
)
WIDTH = 4  # lanes per bundle: their C x C matrices fill one bank of PSUM
# most K, most V, lanes: at most 166 of SBUF's 176 KiB are live
LANES = ((64, 128, 8), (128, 256, 6), (256, 512, 2))
# the same with a decay per channel, K at most 128
CHANNEL_LANES = ((128, 256, 4), (128, 512, 2))
LAYER_LANES = 6  # of a whole layer in float32, where the convolution's tiles lie in SBUF, too
# A wave of a whole layer takes at most LONG_LANES lanes of sequences of more than LONG tokens: more
# of the convolution's results wait in SBUF then, and six lanes of 1,536 tokens do not fit.
LONG, LONG_LANES = 1024, 5
BACKWARD_BUNDLES = (
    2  # of a layer per wave backward: each has a bank of PSUM for sums over all tokens
)
LANE_CHUNKS = 64  # of a sequence per call of the rule: 9,000 instructions backward, 4,000 forward
STEP_HEADS = 256  # value heads per decode step: 1,500 to 2,600 instructions
# per call of the residual update: 1,200 instructions forward, 4,400 backward, at four columns
TOKENS = 8192
# The Scalar engine's rsqrt, which kernels use, is right from here to 2^97.
LEAST_RSQRT = 2.0**-87
LEAST_SCALE = 2.0**-16  # of norms before they are squared


@dataclass(frozen=True)
class Plan:
    """Describes how one kernel call cuts its work: the last arguments of `gated_delta_rule_fwd`."""

    every: int
    C: int
    lanes: int
    width: int


def choose(N: int, H: int, HV: int, K: int, V: int, most: int = 8, channels: bool = False) -> Plan:
    """Chooses as many lanes as fit SBUF, in two bundles where there are two;
    tests check the peaks.
    """
    table, most_width = (CHANNEL_LANES, 2) if channels else (LANES, WIDTH)
    lanes = min(most, next(count for most_k, most_v, count in table if most_k >= K and most_v >= V))
    width = max(min(max(2, lanes // 2), -(-N * HV // 2)), min(HV // H, lanes, most_width))
    return Plan(EVERY, CHUNK, lanes, width)


def choose_layer(N: int, T: int, H: int, HV: int, K: int, V: int, most: int) -> Plan:
    """Chooses as `choose` does, for a call of a whole layer;
    a wave has one sequence of LONG_LANES heads.
    """
    plan = choose(N, H, HV, K, V, most)
    return (
        replace(plan, lanes=min(plan.lanes, LONG_LANES)) if T > LONG and HV < LONG_LANES else plan
    )


def stretches(T: int) -> int:
    """Returns in how many stretches backward solves T tokens;
    each but the first needs a kept state.
    """
    return -(-T // (CHUNK * EVERY))


def choose_square_scale(eps):
    """Chooses a power of two s for reciprocal norms, s (s^2 sum(x^2) + s^2 eps)^-1/2: no bit
    depends on s.

    With the least s, 2^-16, sums up to 2^124 are in rsqrt's range; a small eps needs a larger one.
    """
    s = 1.0
    while s > LEAST_SCALE and s * s * eps >= 4 * LEAST_RSQRT:
        s = s / 2
    return s


def find_largest_norm(eps):
    """Returns the largest norm of a row that kernels divide by: rsqrt takes its square, scaled."""
    return 2.0**46 / choose_square_scale(eps)


def split_decays(g):
    """Returns the multiple of 2^-8 next to g, and the rest: the kernels take g so, with both on a
    last axis.

    Sums of the multiples are exact down to -2^16, and those of the rests are small.
    """
    near = (g * 256.0).round() / 256.0
    return near, g - near


def double(times):
    """Returns 2 to the power of `times`, which NKI's tracer takes written so alone."""
    power = 1
    for _ in range(times):
        power = 2 * power
    return power


def split(n, size):
    """Cuts 0 .. n into parts of `size`, the last one shorter: [(start, stop)]."""
    parts = []
    for start in range(0, n, size):
        parts.append((start, min(start + size, n)))
    return parts


def list_due(i, count):
    """Returns [i] where it is one of `count` things, else []:
    what a stage does that is so far behind.
    """
    return [i] if i >= 0 and i < count else []


def split_evenly(n):
    """Cuts 0 .. n into equal parts of at most 128, the last one shorter: [(start, stop)]."""
    count = (n + PARTITIONS - 1) // PARTITIONS
    return split(n, (n + count - 1) // count)


def pad_to_rows(tokens):
    """Returns the rows of the tile that holds `tokens` tokens:
    the next power of two, and at least 2.
    """
    rows = 2
    while rows < tokens:
        rows = rows * 2
    return rows


def list_bundles(N, H, HV, width):
    """Cuts a call into bundles, dicts of these numbers:

    n                       the sequence
    first, lanes            the bundle's value heads are first .. first + lanes
    key_first, key_heads    its key heads are key_first .. key_first + key_heads
    slot                    the first head of the gradients of q and k that the bundle writes

    A bundle holds whole groups of value heads that share a key head or, where a group is larger
    than `width`, a part of one: a group has as few parts as `width` allows, and no two of them
    differ by more than a head. Gradients of q and k are sums over a bundle's lanes; `slot` is
    `key_first` unless groups are divided.
    """
    group = HV // H
    spans = []
    if group <= width:
        count = (H + width // group - 1) // (width // group)
        heads = (H + count - 1) // count
        spans = split(HV, heads * group)
    else:
        parts = (group + width - 1) // width
        for h in range(H):
            first = h * group
            for part in range(parts):
                stop = h * group + (group * (part + 1) + parts - 1) // parts
                spans.append((first, stop))
                first = stop
    every = []
    for n in range(N):
        for i in range(len(spans)):
            first, stop = spans[i]
            every.append(
                {
                    "n": n, "first": first, "lanes": stop - first, "key_first": first // group,
                    "key_heads": max(1, (stop - first) // group),
                    "slot": first // group if group <= width else i,
                }
            )  # fmt: skip
    return every


def list_sides(bundle, H, K, V):
    """Lists the channels of a bundle's q, k and v in a layer, where those of all heads lie side by
    side.

    Returns [(first channel, channels)].
    """
    first, heads = bundle["key_first"], bundle["key_heads"]
    return [
        (first * K, heads * K), ((H + first) * K, heads * K),
        (2 * H * K + bundle["first"] * V, bundle["lanes"] * V),
    ]  # fmt: skip


def count_slots(H, HV, width):
    """Returns how many heads the gradients of q and k have: H,
    or a multiple where groups are divided.
    """
    every = list_bundles(1, H, HV, width)
    last = every[len(every) - 1]
    return last["slot"] + last["key_heads"]


def list_waves(N, H, HV, width, lanes, most=8):
    """Returns the bundles in lists of about `lanes` lanes, and at most `most` bundles."""
    every = list_bundles(N, H, HV, width)
    per_wave = min(most, max(1, lanes // every[0]["lanes"]))
    lists = []
    for span in split(len(every), per_wave):
        start, stop = span
        lists.append(every[start:stop])
    return lists
