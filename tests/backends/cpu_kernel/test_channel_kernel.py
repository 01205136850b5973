"""The C++ kernel of Kimi Delta Attention: its bits, and mistakes in it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_trn.backends import compiler
from delta_trn.backends.gated_delta_rule import chunked_kernel
from delta_trn.backends.parity import rule
from delta_trn.backends.parity.channel_cases import STEPS
from delta_trn.backends.parity.rule_cases import BOTH, Case
from tests.backends.cpu_kernel.test_chunked_kernel import ENDS, check_bits_of_threads

BACKENDS = Path(chunked_kernel.__file__).parents[1]
SOURCE = BACKENDS / "kimi_delta_attention" / "chunked_kernel.cpp"
# two chunks of 64 with a last block of 16, one token, heads in groups, all decays
WHOLE = Case(
    "kimi kernel",
    1,
    131,
    1,
    72,
    40,
    "",
    HV=2,
    decay="split",
    reflect=True,
    norm="random",
    state=True,
    loss=BOTH,
    lengths=(110, 1, 0, 20),
    op="kimi_delta_attention",
)
# chunks of 32 tokens, and of 64
CHUNKS = {
    K: replace(WHOLE, name=f"ends of {K}", B=1, T=sum(ENDS), K=K, V=24, HV=1, lengths=ENDS)
    for K in (40, 72)
}
pytestmark = pytest.mark.skipif(
    chunked_kernel.library(True).functions is None, reason=chunked_kernel.library(True).note
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_the_same_bits_with_any_number_of_threads(dtype):
    check_bits_of_threads(WHOLE, dtype)


MISTAKES = [
    ("scale_rows(f.S, x.gam[m - 1], h.K, h.V, f.S)", "scale_state(f.S, h.K, h.V, x.gam[m - 1][0])"),
    ("scale_rows(f.dS, f.x.gam[m - 1]", "scale_rows(f.dS, f.x.gam[0]"),
    ("x *= all(a[i + r][c]);", ""),
    (
        "x = places(n * W) == static_cast<int32_t>(i + r) ? k_c : x;",
        "x = places(n * W) == static_cast<int32_t>(i + r) ? all(a[i + r][c]) * k_c : x;",
    ),
    ("load(x.f[level][j] + c);", "load(x.f[0][j] + c);"),
    (
        "for (long i = middle - 1; i >= start; i--) {",
        "for (long i = middle - 1; i >= middle - BLOCK; i--) {",
    ),
    ("product<PLAIN, FULL>(rows, columns, h.K, right.from(m), left, N.from(middle, start));", ""),
    ("product<TRANSPOSED, FULL>(columns, K, rows, dkk, FK.from(middle), row_k.from(start));", ""),
    ("decay[j] *= a_i;", ""),
    (
        "later[j] += pairs[t][j], total += later[j];",
        "later[j] += pairs[t][j], total += pairs[t][j];",
    ),
    ("later += load(x.QK[i] + c) * dq + load(k[i] + c) * dk;", "later += load(x.QK[i] + c) * dq;"),
    ("store(f.dg[j] + c, load(f.dg[j] + c) + before);", ""),
    ("x.gam[m - 1][i] * dot(h.V", "0.0f * dot(h.V"),
    ("own = all(dP[i][i]);", "own = all(0.0f);"),
    ("multiply(k, x.lam, m, h.K, x.written);", "multiply(k, x.gam, m, h.K, x.written);"),
]


STEP_MISTAKE = ("(gam[i] * S[i", "(gam[0] * S[i")
# it leaves out the second half of a last chunk of three blocks
CUT_MISTAKE = ("start + s < m; start += 2 * s)", "start + 2 * s <= m; start += 2 * s)")


def passes(line=""):
    step = line == STEP_MISTAKE[0]
    judged = rule.step_verdicts if step else rule.verdicts
    case = STEPS["decode_kimi_split"] if step else WHOLE
    case = CHUNKS[72] if line == CUT_MISTAKE[0] else case
    return all(verdict.passed for verdict in judged(case, torch.float32, "chunked"))


@pytest.mark.parametrize("K", CHUNKS)
def test_a_last_chunk_of_any_length_passes_parity(K):
    verdicts = list(rule.verdicts(CHUNKS[K], torch.float32, "chunked"))
    assert verdicts and all(verdict.passed for verdict in verdicts), verdicts


@pytest.mark.parametrize(
    ("line", "mistake"), [*MISTAKES, STEP_MISTAKE, CUT_MISTAKE], ids=lambda x: x[:40]
)
def test_a_mistake_in_the_kernel_turns_parity_red(line, mistake, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(compiler.SWITCH, raising=False)
    monkeypatch.setattr(compiler, "FLAGS", compiler.FLAGS.replace("-O3", "-O1"))
    text = SOURCE.read_text()
    assert text.count(line) == 1
    for header in chunked_kernel.HEADERS:
        copy = tmp_path / header.relative_to(BACKENDS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(header.read_text())
    kernel = tmp_path / "kimi_delta_attention" / "kernel.cpp"
    kernel.parent.mkdir()
    kernel.write_text(text.replace(line, mistake))
    assert passes(line)
    library = compiler.load(kernel)
    assert library.functions is not None, library.note
    monkeypatch.setattr(chunked_kernel, "library", lambda channels: library)
    assert not passes(line)
