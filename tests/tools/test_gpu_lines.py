"""The list of lines that only a GPU reaches: they are found, and each has a reason or is reached."""

import json

import pytest

from tools import gpu_lines

SOURCE = """
def measure(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return 1
    if device.type != "cuda":
        return 2
    with clock():
        start = torch.cuda.Event()
    return 3


class Run:
    def pick(self, kind):
        if kind in ("auto", "cuda"):

            def later():
                return 4

            for x in kind:
                print(x)
"""
FOUND = [("measure", 4), ("measure", 5), ("measure", 9), ("Run.pick", 20)]


def test_lines_behind_a_condition_on_cuda_or_that_call_it_are_found():
    lines = list(gpu_lines.lines_of("a.py", SOURCE))
    assert [(x.function, x.number) for x in lines if x.text[:5] != "print"] == FOUND
    assert lines[0].text == "torch.cuda.synchronize(device)"


def test_what_is_not_executed_needs_a_reason_and_no_reason_outlives_its_lines():
    lines = [x for x in gpu_lines.lines_of("a.py", SOURCE) if x.function == "measure"]
    reasons = {("a.py", "measure"): gpu_lines.SEVERAL}
    table, wrong = gpu_lines.report(lines, {"a.py": [4, 5]}, reasons)
    assert table[0] == "3 lines that only a GPU reaches, 1 not executed" and not wrong
    assert table[1] == "a.py:9 measure: start = torch.cuda.Event()  [several GPUs]"
    (complaint,) = gpu_lines.report(lines, {"a.py": [4, 5]}, {})[1]
    assert "a.py:9 in measure was not executed" in complaint
    (complaint,) = gpu_lines.report(lines, {"a.py": [4, 5, 9]}, reasons)[1]
    assert "REASONS has a.py, measure, whose lines are executed" in complaint
    gone = {("a.py", "measure"): f"{gpu_lines.TEST}tests/gone.py"}
    (complaint,) = gpu_lines.report(lines, {"a.py": [4, 5]}, gone)[1]
    assert "names tests/gone.py, which is not here" in complaint


def test_every_reason_names_lines_that_there_are():
    assert {(x.file, x.function) for x in gpu_lines.every_line()} >= set(gpu_lines.REASONS)


def test_the_command_reads_the_lines_of_a_run_before(tmp_path, capsys):
    file = tmp_path / "lines.json"
    executed = {}
    for x in gpu_lines.every_line():
        if (x.file, x.function) not in gpu_lines.REASONS:
            executed.setdefault(x.file, []).append(x.number)
    file.write_text(json.dumps(executed))
    assert gpu_lines.main(["--lines", str(file)]) == 0
    assert f"[{gpu_lines.DRIVER}]" in capsys.readouterr().out


def test_without_coverage_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(gpu_lines.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        gpu_lines.main([])
    assert "pip install coverage" in capsys.readouterr().err
