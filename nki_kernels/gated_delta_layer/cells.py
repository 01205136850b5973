"""Lists the cells of a layer's convolution, and in which turn of the rule each is computed."""

from delta_trn.nki_kernels.gated_delta_rule_fwd import AHEAD, LOAD
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, list_sides, split

STRETCH = 512  # tokens, at most; half of it where masks of packed sequences need the space
STAGES = 2  # steps by which a cell's last stage is behind its first


def cut_stretches(T, first, longest):
    """Cuts the tokens: the first stretch may be short, so that the rule can begin."""
    spans = []
    start = 0
    while start < T:
        size = first if start == 0 else longest - start % longest
        spans.append((start, min(start + size, T)))
        start = start + size
    return spans


def list_cells(wave, T, call, stages):
    """Lists the cells of a wave by stretch, bundle, and q (side 0), k (1) and v (2).

    A cell is a dict of the numbers that `tiles.cut_cells` describes, and of these:

    group       counts a bundle's cells of one stretch, of which there are `parts`
    stream      the bundle's number in the wave
    turn        the first turn that loads a chunk of the cell's tokens
    """
    cells, before = [], [0, 0]
    for entry in stages:
        stage, parity, ahead = entry
        if stage == LOAD:
            before[parity] = AHEAD - ahead
    C, H, K, V = call["C"], call["H"], call["K"], call["V"]
    longest = STRETCH // 2 if call["packed"] else STRETCH
    spans = cut_stretches(T, C, longest)
    for s in range(len(spans)):
        t0, t1 = spans[s]
        for b in range(len(wave)):
            bundle = wave[b]
            sides = list_sides(bundle, H, K, V)
            group, banks = 0, []
            for side in range(3):
                low, width = sides[side]
                for span in split(width, BANK):
                    banks.append((side, low + span[0], low + span[1]))
            count = 0
            for bank in banks:
                count = count + len(split(bank[2] - bank[1], PARTITIONS))
            for bank in banks:
                side, c0, c1 = bank
                parts = split(c1 - c0, PARTITIONS)
                for part in range(len(parts)):
                    a0, a1 = parts[part]
                    cells.append(
                        {
                            "b": bundle["n"], "t0": t0, "t1": t1, "c0": c0, "c1": c1, "part": part, "a0": a0,
                            "a1": a1, "parts": count, "group": group, "stream": b, "side": side,
                            "turn": t0 // C + before[b % 2],
                        }
                    )  # fmt: skip
                    group = group + 1
    return cells


def plan_steps(cells, turns):
    """Lists (first, step, stop) of each turn: steps first .. step come before it, and step .. stop in it.

    What a turn loads is done before it. The steps that later turns need are spread evenly.
    """
    last = len(cells) + STAGES
    plan = []
    stop = 0
    for turn in range(turns):
        first, step, count = stop, stop, 0
        for c in range(len(cells)):
            if cells[c]["turn"] <= turn:
                step = max(step, c + 1 + STAGES)
        for i in range(step, last):
            left = cells[max(0, i - STAGES)]["turn"] - turn
            count = max(count, (i - step + left) // max(1, left))
        stop = min(step + count, last)
        plan.append((first, step, stop))
    return plan
