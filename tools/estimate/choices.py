"""Other launches of a kernel than the table's, estimated: `launch.TABLE` was chosen from these."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from triton.runtime.errors import PTXASError

from delta_trn.triton_kernels.hopper.gradients import SIZE
from delta_trn.triton_kernels.launch import Tile, adjust, config
from tools.estimate.estimates import Estimator
from tools.estimate.work import ITEM, SHAPES, launches

# kernel -> columns, warps, stages, most registers and upright to try; one that does not cut the
# columns has 0
KERNELS = {
    "prepare": ((0,), (2, 4, 8), (1,), (None, 128, 168), (False,)),
    "scan": ((32, 64, 128), (4, 8), (1, 2, 3), (None,), (False, True)),
    "reverse": ((32, 64, 128), (4, 8), (1, 2, 3), (None,), (False, True)),
    "gradients": ((32, 64, 128, 256), (4, 8), (1, 2, 3), (None, 128, 168), (False,)),
}


def table(kernel: str, shape: str) -> Iterator[str]:
    """Yields the lines of a table: the time of a call by the launch of one of its kernels, the
    fastest first.

    It is that of the whole call, since the columns of the scans decide how many programs run and
    whether sequences are cut.
    """
    sizes, estimator = SHAPES[shape], Estimator()
    if kernel == "gradients" and not sizes.rule and sizes.K == sizes.V == SIZE:
        yield (
            f"\n## gradients at {shape}: the kernel has one launch, "
            "triton_kernels/hopper/gradients.py\n"
        )
        return
    heads = sizes.sequences * sizes.HV
    now = getattr(config(sizes.K, sizes.V, itemsize=ITEM, heads=heads, rule=sizes.rule), kernel)
    tiles = {
        Tile(columns or now.columns, warps, stages, registers=registers, upright=upright)
        for columns, warps, stages, registers, upright in product(*KERNELS[kernel])
        if columns <= sizes.V
    } | {now}
    results = []
    for tile in tiles:
        with adjust(lambda row, tile=tile: replace(row, **{kernel: tile})):
            try:
                estimates = [estimator.estimate(launch) for launch in launches(sizes)]
            except (
                ValueError,
                PTXASError,
            ) as failure:  # it exceeds an SM, or has too few registers
                results.append((float("inf"), tile, str(failure).strip().splitlines()[-1]))
                continue
        own = next(x for x in estimates if x.name.removesuffix(" scan") == kernel)
        assert own.code is not None and own.simulation is not None
        text = (
            f"{own.microseconds:.0f} | {own.code.registers} | {own.code.stack} "
            f"| {own.code.shared / 1024:.0f} | {own.simulation.resident} |"
        )
        results.append((sum(x.microseconds for x in estimates), tile, text))
    yield f"\n## {kernel} at {shape}, estimated, not measured; launch.TABLE has {now}\n"
    yield (
        "| columns | warps | stages | most registers | tiles | forward and backward us | kernel us "
        "| registers | stack | shared KB | programs per SM |"
    )
    yield "|" + " --- |" * 11
    for total, tile, text in sorted(results, key=lambda x: x[0]):
        time = f"{total:.0f}" if text.endswith("|") else "- "
        launch = (
            tile.columns,
            tile.warps,
            tile.stages,
            tile.registers or "",
            "upright" * tile.upright,
        )
        yield f"| {' | '.join(map(str, launch))} | {time} | {text}"
