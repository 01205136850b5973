"""Makes the gradient of a layer's hidden states of those of x and z, chunk by chunk.

    x = W h     z = W_z h       dh = dx W + dz W_z, rows are tokens

A product sums over its operands' partitions, here channels. W and W_z lie so in HBM, and come in groups of
their rows, each while the one before is multiplied. dx and dz of a chunk, rounded as they are stored, are
transposed, a group in one bank of PSUM: up to 512 columns of a bundle. Another bank has a part of dh, up to
512 columns; when all groups of all bundles of a sequence have been added, the next part follows. `start`
makes a dict of

    weight      W [channels, d]
    gate        W_z [HV V, d]
    slopes      as `gates` has them
    dhidden     [N, T, d] in HBM

`list_groups` makes dicts of

    cell        the number of the cell of dx; -1: the columns are of dz, where heads lie side by side
    low, high   its first column in the cell or in dz, and the one behind the last
    spans       [(first column, column behind the last, row of the weight)], columns counted from `low`

and a sequence's dict has

    n           its number
    streams     of its bundles
    alone       whether the wave has no other, and so SBUF for weights of the next chunk, and PSUM for sums
                that are stored later
    steps       [(part of dh, stream, group)]
    done        how many steps of the chunk at hand are done
    weights     tiles that are loaded ahead, of the step that comes next
    sum         of the part at hand
    finished    [(sum, first token, part of dh)] that are not stored yet
"""

from delta_trn.nki_kernels.gated_delta_layer.convolution import find_channels
from delta_trn.nki_kernels.language import nisa, nl
from delta_trn.nki_kernels.plan import BANK, PARTITIONS, split
from delta_trn.nki_kernels.tiles import copy_blocks, copy_scaled, psum, sbuf


def start(weight, gate, slopes, N, T):
    """Makes the dict that this module's functions take as `projection`, once per call."""
    dhidden = nl.ndarray((N, T, weight.shape[1]), dtype=weight.dtype, buffer=nl.shared_hbm)
    return {"weight": weight, "gate": gate, "slopes": slopes, "dhidden": dhidden}


def list_groups(plan, bundle, V):
    """Lists the groups of a bundle's columns, those of z first, which are there before those of x."""
    groups = []
    for span in split(bundle["lanes"] * V, BANK):
        low, high = span
        row = bundle["first"] * V + low
        groups.append({"cell": -1, "low": low, "high": high, "spans": [(0, high - low, row)]})
    for c in range(len(plan["cells"])):
        first, stop = plan["cells"][c]
        spans = []
        for span in find_channels(plan, first, stop):
            low, high, row = span
            spans.append((low - first, high - first, row))
        groups.append({"cell": c, "low": 0, "high": min(stop, plan["channels"]) - first, "spans": spans})
    return groups


def open_sequences(streams, projection):
    """Makes the dicts of a wave's sequences, of which each has all its bundles there."""
    sequences = []
    parts = split(projection["weight"].shape[1], BANK)
    for stream in streams:
        if len(sequences) == 0 or sequences[len(sequences) - 1]["n"] != stream["bundle"]["n"]:
            sequences.append(
                {"n": stream["bundle"]["n"], "streams": [], "done": 0, "weights": [], "finished": []}
            )
        sequences[len(sequences) - 1]["streams"].append(stream)
    for sequence in sequences:
        sequence["alone"] = len(sequences) == 1
        sequence["steps"] = []
        for part in parts:
            for of_x in (False, True):
                for stream in sequence["streams"]:
                    for g in range(len(stream["groups"])):
                        if (stream["groups"][g]["cell"] >= 0) == of_x:
                            sequence["steps"].append((part, stream, g))
    return sequences


def transpose_groups(stream, index, due, eye):
    """Transposes groups of a chunk until `due` are done, or one is not there yet."""
    own, groups = stream["own"][index], stream["groups"]
    while len(own["turned"]) < due:
        group = groups[len(own["turned"])]
        if group["cell"] >= len(own["dx_cells"]):
            return
        own["turned"].append(transpose_group(own, group, eye))


def transpose_group(own, group, eye):
    """Transposes dx or dz of a group to [128, blocks, tokens]: column 128 i + p lies at (p, i)."""
    low, high, tokens = group["low"], group["high"], own["tokens"]
    if group["cell"] < 0:
        dz_sb = own["dz"]
        columns_sb = dz_sb.reshape((dz_sb.shape[0], dz_sb.shape[1] * dz_sb.shape[2]))
    else:
        columns_sb = own["dx_cells"][group["cell"]]
    blocks = split(high - low, PARTITIONS)
    out_ps = psum((min(high - low, PARTITIONS), len(blocks), tokens))
    for i in range(len(blocks)):
        first, stop = blocks[i]
        nisa.nc_matmul(
            dst=out_ps[0 : stop - first, i, :], stationary=columns_sb[0:tokens, low + first : low + stop],
            moving=eye[0:tokens, 0:tokens], is_moving_onezero=True,
        )  # fmt: skip
    out_sb = sbuf(out_ps.shape, columns_sb.dtype)
    copy_blocks(out_sb, 0, tokens, out_ps, high - low)
    return out_sb


def load_group(step, projection):
    """Loads a step's part of the weight: [128, blocks, columns of dh], rows as `transpose_group` has them."""
    part, stream, g = step
    group = stream["groups"][g]
    first, stop = part
    weight = projection["gate"] if group["cell"] < 0 else projection["weight"]
    count = group["high"] - group["low"]
    out_sb = sbuf(
        (min(count, PARTITIONS), (count + PARTITIONS - 1) // PARTITIONS, stop - first), weight.dtype
    )
    for span in group["spans"]:
        at, high, row = span
        while at < high:
            block, p = at // PARTITIONS, at % PARTITIONS
            whole = (high - at) // PARTITIONS if p == 0 else 0
            rows = min(PARTITIONS - p, high - at)
            if whole > 0:
                d, rows = weight.shape[1], whole * PARTITIONS
                nisa.dma_copy(
                    dst=out_sb[:, block : block + whole, :],
                    src=weight.ap(
                        pattern=[[d, PARTITIONS], [PARTITIONS * d, whole], [1, stop - first]],
                        offset=row * d + first,
                    ),
                )
            else:
                nisa.dma_copy(dst=out_sb[p : p + rows, block, :], src=weight[row : row + rows, first:stop])
            at, row = at + rows, row + rows
    return out_sb


def multiply_groups(sequences, index, due, projection):
    """Adds groups of a chunk to dh until `due` of all sequences' steps are done, or one is not there yet."""
    for sequence in sequences:
        count = len(sequence["steps"])
        while sequence["done"] < min(due, count):
            step = sequence["steps"][sequence["done"]]
            if step[2] >= len(step[1]["own"][index]["turned"]):
                return
            multiply_group(sequence, index, projection)
        if sequence["done"] < count:
            return  # a bank is one sequence's at a time
        due = due - count


def multiply_group(sequence, index, projection):
    """Adds a group's products to dh, and stores a part of it behind its last group."""
    steps, done = sequence["steps"], sequence["done"]
    part, stream, g = steps[done]
    first, stop = part
    own = stream["own"][index]
    turned_sb, tokens, group = own["turned"][g], own["tokens"], stream["groups"][g]
    if len(sequence["weights"]) == 0:
        sequence["weights"].append(load_group(steps[done], projection))
    w_sb = sequence["weights"][0]
    sequence["weights"] = []
    if done + 1 < len(steps) or (index > 0 and sequence["alone"]):
        sequence["weights"].append(load_group(steps[(done + 1) % len(steps)], projection))
    if done == 0 or steps[done - 1][0] != part:
        sequence["sum"] = psum((tokens, stop - first))
    blocks = split(group["high"] - group["low"], PARTITIONS)
    for i in range(len(blocks)):
        rows = blocks[i][1] - blocks[i][0]
        nisa.nc_matmul(dst=sequence["sum"], stationary=turned_sb[0:rows, i, :], moving=w_sb[0:rows, i, :])
    sequence["done"] = done + 1
    store_hidden(sequence, projection)
    if done + 1 == len(steps) or steps[done + 1][0] != part:
        sequence["finished"].append((sequence["sum"], own["start"], part))
        if not sequence["alone"]:
            store_hidden(sequence, projection)


def store_hidden(sequence, projection):
    """Stores the parts of dh that were finished: a step later, so that no engine waits for their sums."""
    while len(sequence["finished"]) > 0:
        sum_ps, t0, part = sequence["finished"][0]
        first, stop = part
        tokens = sum_ps.shape[0]
        out_sb = sbuf((tokens, stop - first), projection["dhidden"].dtype)
        copy_scaled(out_sb, sum_ps)
        nisa.dma_copy(dst=projection["dhidden"][sequence["n"], t0 : t0 + tokens, first:stop], src=out_sb)
        sequence["finished"] = sequence["finished"][1:]


def count_steps(sequences):
    """Returns how many steps a chunk has in all sequences."""
    count = 0
    for sequence in sequences:
        count = count + len(sequence["steps"])
    return count


def finish_chunk(streams, sequences, index, projection, eye):
    """Does what is left of a chunk."""
    for stream in streams:
        transpose_groups(stream, index, len(stream["groups"]), eye)
    multiply_groups(sequences, index, count_steps(sequences), projection)
    for sequence in sequences:
        sequence["done"] = 0
