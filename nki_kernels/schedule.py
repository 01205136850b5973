"""Orders the stages of a kernel: what a stage needs and makes, and in which order a table issues
them.

An engine runs its instructions in the order in which a kernel issues them, and waits where an
operand is not there yet. Issued chunk by chunk, each engine would wait for the others most of the
time. So a kernel works in turns, and a turn holds stages of several chunks and of several bundles
of heads. A table has what one turn issues, a tuple of entries

    (stage, bundles, late)      stage, in turn t, of chunk t - late: of every other bundle (EVEN,
                                ODD), or ALL

in order. A stage may have several entries for the same bundles. Then each does a share of the
stage, the first one that comes the first share. Chunks are counted as they are computed: backward,
0 is the last one.

The tables are in `nki_kernels.orders`, as texts for `read_order`; `tools/schedule.py` finds them,
and writes that file. When a kernel's module is loaded, `rank` refuses a table that issues a stage
before what it needs.
"""

from dataclasses import dataclass

EVEN = 0
ODD = 1
ALL = 2
BUNDLES = ("even", "odd", "all")


@dataclass(frozen=True)
class Stage:
    """Describes a stage of a kernel's work on one chunk; what stages need and make are names.

    needs       what has to be complete before the first share
    follows     the same, share by share: half of the shares need half of the shares of what they
                follow
    before      what the chunk before has to have made, and in this chunk the share before
    makes       what other stages need
    in_place    its shares write where those of the chunk before did: share r comes after share r +
                1 of that
    """

    name: str
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    in_place: bool = False


def read_order(text: str):
    """Reads a table from its text.

    >>> read_order("load even 0; L, P all 2")
    (('load', 0, 0), ('L, P', 2, 2))
    """
    entries = [entry.rsplit(maxsplit=2) for entry in text.split(";")]
    return tuple(
        (" ".join(name.split()), BUNDLES.index(bundles), int(late))
        for name, bundles, late in entries
    )


def rank(kernel: str, stages: tuple[Stage, ...], table):
    """Checks a table, and returns it with shares:
    (stage, bundles, late, share from 1 on, shares).
    """
    for bundles in (EVEN, ODD):
        check_dependencies(kernel, stages, table, bundles)
    return tuple(
        (name, bundles, late, *find_share(table, at))
        for at, (name, bundles, late) in enumerate(table)
    )


def find_share(table, at: int) -> tuple[int, int]:
    """Finds which share of its stage an entry does, and how many there are."""
    name, bundles, late = table[at]
    times = [
        (o_late, i) for i, (o_name, o, o_late) in enumerate(table) if (o_name, o) == (name, bundles)
    ]
    return sum(time <= (late, at) for time in times), len(times)


def list_waits(stages: tuple[Stage, ...], counts: dict[str, int]):
    """Lists what each share of each stage waits for: (stage, share, item, maker, its share, chunks
    back).

    counts is how many shares each stage has.
    """
    makers = {item: stage.name for stage in stages for item in stage.makes}
    waits = []
    for stage in stages:
        own = counts[stage.name]
        for share in range(1, own + 1):
            for item in stage.needs:
                waits.append((stage.name, share, item, makers[item], counts[makers[item]], 0))
            for item in stage.follows:
                shares = counts[makers[item]]
                waits.append((stage.name, share, item, makers[item], -(-share * shares // own), 0))
            for item in stage.before:
                back = (
                    (makers[item], counts[makers[item]], 1)
                    if share == 1
                    else (makers[item], share - 1, 0)
                )
                waits.append((stage.name, share, item, *back))
            if stage.in_place and share < own:
                waits.append((stage.name, share, "room", stage.name, share + 1, 1))
    return waits


def check_dependencies(kernel: str, stages: tuple[Stage, ...], table, bundles: int) -> None:
    """Raises ValueError if a stage of EVEN or ODD bundles is missing,
    or comes before what it needs.
    """
    times: dict[str, list[int]] = {stage.name: [] for stage in stages}
    for at, (name, own, late) in enumerate(table):
        if name not in times:
            raise ValueError(
                f"{kernel}: the order has {name!r}, which is none of the kernel's stages"
            )
        if own in (bundles, ALL):
            times[name].append(late * len(table) + at)
    for name, own in times.items():
        if not own:
            raise ValueError(f"{kernel}: the order has no {name!r} for {BUNDLES[bundles]} bundles")
        own.sort()
    counts = {name: len(own) for name, own in times.items()}
    for name, share, item, maker, part, back in list_waits(stages, counts):
        if times[name][share - 1] <= times[maker][part - 1] - back * len(table):
            raise ValueError(
                f"{kernel}: the order issues {name!r} (share {share}) of {BUNDLES[bundles]} "
                f"bundles before it has {item!r}{' of the chunk before' if back else ''}, made by "
                f"{maker!r} (share {part}); move one of them, or remake the order with "
                "tools/schedule.py"
            )


def count_turns(entries, chunks):
    """Returns how many turns a kernel takes for its chunks."""
    last = 0
    for entry in entries:
        last = max(last, entry[2])
    return chunks + last


def list_work(entries, chunks):
    """Lists what a kernel issues for `chunks` chunks: (stage, bundles, chunk, share, shares)."""
    work = []
    for turn in range(count_turns(entries, chunks)):
        for entry in entries:
            chunk = turn - entry[2]
            if chunk >= 0 and chunk < chunks:
                work.append((entry[0], entry[1], chunk, entry[3], entry[4]))
    return work


def list_steps(count, share, shares):
    """Returns the steps of a share of a stage that has `count` steps: (first, stop)."""
    return count * (share - 1) // shares, count * share // shares
