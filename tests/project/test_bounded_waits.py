"""Every wait for another process in the tests of training ends:
a hang is a failure that says where.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for folder in ("tests/train", "tests/support") for path in (ROOT / folder).rglob("*.py")
)
RUNS = {"run", "call", "check_call", "check_output"}


def unbounded(source: str) -> list[str]:
    """Returns every call that waits for a process or a thread for as long as it takes."""
    waits = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        whose, name = ast.unparse(node.func.value), node.func.attr
        # str.join has an argument, and a Saver waits for its own thread
        is_wait = (
            name in ("join", "wait") and not node.args and not node.keywords and "sav" not in whose
        )
        is_run = (whose == "subprocess" and name in RUNS) or name == "communicate"
        if (is_wait and whose != "self") or (
            is_run and all(k.arg != "timeout" for k in node.keywords)
        ):
            waits.append(f"line {node.lineno}: {whose}.{name} has no timeout")
    return waits


def test_every_wait_for_a_process_is_bounded():
    waits = [
        f"{path.relative_to(ROOT)}, {wait}"
        for path in FILES
        for wait in unbounded(path.read_text())
    ]
    assert not waits, "\n".join(waits)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        ("process.join()", 1),
        ("node.wait()", 1),
        ("subprocess.run(words, check=True)", 1),
        ("agent.communicate()", 1),
        ("process.join(10)", 0),
        ("node.wait(timeout=10)", 0),
        ("subprocess.run(words, timeout=9)", 0),
        ("', '.join(names)", 0),
    ],
)
def test_a_wait_without_an_end_is_seen(call, count):
    assert len(unbounded(call)) == count
