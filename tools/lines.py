"""Counts the lines of the project's Python files by folder, beside the budget.

python -m tools.lines
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the most lines outside tests and in tests
BUDGET = {"outside tests": 44_000, "in tests": 29_000}


def count(root: Path = ROOT) -> dict[str, int]:
    """Returns the lines of each top folder; those of results, which are no code of ours, are left out."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    lines: Counter[str] = Counter()
    for name in names.stdout.splitlines():
        if (root / name).is_file() and not (root / name).is_symlink() and not name.startswith("results/"):
            lines[name.split("/")[0]] += len((root / name).read_text().splitlines())
    return dict(sorted(lines.items()))


def sums(folders: dict[str, int]) -> dict[str, int]:
    """Returns what the budget bounds."""
    inside = folders.get("tests", 0)
    return {"outside tests": sum(folders.values()) - inside, "in tests": inside}


if __name__ == "__main__":
    counted = count()
    for folder, number in counted.items():
        print(f"{number:7,} {folder}")
    for part, number in sums(counted).items():
        print(f"{number:7,} {part}, {BUDGET[part]:,} allowed")
    sys.exit(any(number > BUDGET[part] for part, number in sums(counted).items()))
