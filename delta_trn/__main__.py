"""delta-trn COMMAND ...: every command of the project under one name. Without a command, what there is."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

# Commands that are packages of their own; all the others are training's.
TOOLS = {
    "backends": ("delta_trn.backends.__main__", "which backend runs which operation here, and why not"),
    "parity": ("delta_trn.backends.parity.__main__", "the error of every backend against a float64 judge"),
    "bench": ("delta_trn.backends.bench.__main__", "speed, memory and floors, behind a green parity"),
    "simulator": ("delta_trn.nki_kernels.simulator.__main__", "estimates of NKI kernels, without a chip"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0: done; 1: a check failed; 2: refused, and stderr says why; 128 + n: stopped by signal n.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in TOOLS:
        tool: Callable[[list[str]], int] = import_module(TOOLS[words[0]][0]).main
        return tool(words[1:])
    from delta_trn.train.__main__ import COMMANDS
    from delta_trn.train.__main__ import main as train

    if not words or words[0] in ("-h", "--help", "help"):
        status = train(words)
        width = max(map(len, TOOLS))
        print("\ntools\n" + "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in TOOLS.items()))
        return status
    if words[0] not in COMMANDS:
        known = [*COMMANDS, *TOOLS]
        near = get_close_matches(words[0], known, n=1)
        hint = f"did you mean {near[0]}? known" if near else "known"
        print(f"error: unknown command {words[0]!r}; {hint}: {', '.join(known)}", file=sys.stderr)
        return 2
    return train(words)


if __name__ == "__main__":
    sys.exit(main())
