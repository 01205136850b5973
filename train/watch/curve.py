"""The losses of a run as text, for the last page: plain ASCII, at most 80 columns."""

from collections.abc import Mapping

WIDTH, HEIGHT = 60, 10
MARGIN = 7


def curve(train: Mapping[int, float], validation: Mapping[int, float], levels: Mapping[str, float]) -> str:
    r"""Draws losses over steps. A dot is the mean of a column's training steps, `o` a validation loss.

        train, validation   step -> loss, nats per token
        levels              name -> loss that is drawn as a dashed line

    >>> page = curve({step: 4 / step for step in range(1, 9)}, {8: 0.6}, {"lzma": 2.0})
    >>> page.splitlines()[0], "- lzma" in page
    ('  4.00 |       .', True)
    """
    last = max(train)
    columns: list[list[float]] = [[] for _ in range(WIDTH)]
    for step, loss in train.items():
        columns[_column(step, last)].append(loss)
    means = [sum(losses) / len(losses) if losses else None for losses in columns]
    shown = [mean for mean in means if mean is not None] + [*validation.values(), *levels.values()]
    low, high = min(shown), max(shown)

    def row(loss: float) -> int:
        return round((high - loss) / max(high - low, 1e-9) * (HEIGHT - 1))

    page = [[" "] * WIDTH for _ in range(HEIGHT)]
    for loss in levels.values():
        page[row(loss)][::2] = "-" * len(page[0][::2])
    for i, mean in enumerate(means):
        if mean is not None:
            page[row(mean)][i] = "."
    for step, loss in validation.items():
        page[row(loss)][_column(step, last)] = "o"
    names = {row(loss): name for name, loss in levels.items()}
    lines = [
        f"{high - i * (high - low) / (HEIGHT - 1):6.2f} |{''.join(cells)} {names.get(i, '')}".rstrip()
        for i, cells in enumerate(page)
    ]
    axis = f"{'step 0':<{WIDTH // 2}}{last:>{WIDTH // 2},}"
    return "\n".join([*lines, " " * MARGIN + "+" + "-" * WIDTH, " " * (MARGIN + 1) + axis])


def _column(step: int, last: int) -> int:
    return min(step * WIDTH // last, WIDTH - 1)
