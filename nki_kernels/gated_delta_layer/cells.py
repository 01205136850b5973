"""Lists the cells of a layer's convolution, and when each is computed.

A cell is what `nki_kernels.tiles` calls one: up to 128 channels of a stretch of tokens. It has
three stages. In step i the first one is of cell i, the second one of the cell before, and the third
one of that before.
"""

from delta_trn.nki_kernels.plan import BANK, PARTITIONS, list_sides, split
from delta_trn.nki_kernels.schedule import ALL, count_turns

STRETCH = 512  # tokens, at most; half of it where masks of packed sequences need the space
CONVOLUTION = ("window", "taps", "silu")  # the stages of a cell


def cut_stretches(T, first, longest):
    """Cuts the tokens: the first stretch may be short, so that the rule can begin."""
    spans = []
    start = 0
    while start < T:
        size = first if start == 0 else longest - start % longest
        spans.append((start, min(start + size, T)))
        start = start + size
    return spans


def list_cells(wave, T, call, order):
    """Lists the cells of a wave by stretch, bundle, and q (side 0), k (1) and v (2).

    A cell is a dict of the numbers that `tiles.cut_cells` describes, and of these:

    group       counts a bundle's cells of one stretch, of which there are `parts`
    stream      the bundle's number in the wave
    turn        the first turn that loads a chunk of the cell's tokens
    """
    cells, late = [], [0, 0]
    for entry in order:
        for parity in range(2):
            if entry[0] == "load" and entry[1] in (parity, ALL):
                late[parity] = entry[2]
    C, H, K, V = call["C"], call["H"], call["K"], call["V"]
    longest = STRETCH // 2 if call["packed"] else STRETCH
    for stretch in cut_stretches(T, C, longest):
        t0, t1 = stretch
        for b in range(len(wave)):
            bundle = wave[b]
            own = []
            sides = list_sides(bundle, H, K, V)
            for side in range(3):
                low, width = sides[side]
                for bank in split(width, BANK):
                    parts = split(bank[1] - bank[0], PARTITIONS)
                    for part in range(len(parts)):
                        a0, a1 = parts[part]
                        own.append(
                            {
                                "b": bundle["n"],
                                "t0": t0,
                                "t1": t1,
                                "c0": low + bank[0],
                                "c1": low + bank[1],
                                "part": part,
                                "a0": a0,
                                "a1": a1,
                                "group": len(own),
                                "stream": b,
                                "side": side,
                                "turn": t0 // C + late[b % 2],
                            }
                        )
            for cell in own:
                cell["parts"] = len(own)
                cells.append(cell)
    return cells


def plan_steps(cells, turns):
    """Lists (first, step, stop) of each turn: steps first .. step come before it, and step .. stop
    in it.

    What a turn loads is done before it. The steps that later turns need are spread evenly.
    """
    behind = len(CONVOLUTION) - 1  # steps by which a cell's last stage is behind its first
    last = len(cells) + behind
    plan = []
    stop = 0
    for turn in range(turns):
        first, step, count = stop, stop, 0
        for c in range(len(cells)):
            if cells[c]["turn"] <= turn:
                step = max(step, c + 1 + behind)
        for i in range(step, last):
            left = cells[max(0, i - behind)]["turn"] - turn
            count = max(count, (i - step + left) // max(1, left))
        stop = min(step + count, last)
        plan.append((first, step, stop))
    return plan


def list_layer_work(order, cells, chunks):
    """Lists what a layer issues, as `schedule.list_work` does; for the convolution a step stands
    for a chunk.

    An entry of these stages stands for its share of the turn's steps.
    """
    work, turns = [], count_turns(order, chunks)
    plan = plan_steps(cells, turns)
    for turn in range(turns):
        first, step, stop = plan[turn]
        done = [first, first, first]
        for i in range(first, step):
            advance_to(i + 1, done, work)
        for entry in order:
            stage, bundles, late, share, shares = entry
            if stage in CONVOLUTION:
                for kind in range(3):
                    if CONVOLUTION[kind] == stage:
                        due = step + (stop - step) * share // shares
                        if kind > 0:  # a stage takes what the one before made a step earlier
                            due = min(due, done[kind - 1] + 1)
                        advance_kind(due, kind, done, work)
            elif turn >= late and turn - late < chunks:
                work.append((stage, bundles, turn - late, share, shares))
        advance_to(stop, done, work)
    return work


def advance_to(stop, done, work):
    """Appends the steps before `stop` that are left, of all stages of the convolution."""
    for kind in range(3):
        advance_kind(stop, kind, done, work)


def advance_kind(stop, kind, done, work):
    """Appends the steps before `stop` that are left, of one stage of the convolution."""
    while done[kind] < stop:
        work.append((CONVOLUTION[kind], ALL, done[kind], 1, 1))
        done[kind] = done[kind] + 1
