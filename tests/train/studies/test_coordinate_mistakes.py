"""The coordinate check sees mistakes in muP's rules, by the rows that they are in."""

import pytest

from tests.train.studies.coordinate_mistakes import MISTAKES, Mistake, main, run

# of the fast ones, a row that must be red, and how many others may be
QUICK = {
    "muons shape factor is forgotten": "blocks.1.mlp.up_proj (own update by Muon)",
    "up proj alone at muons plain rate": "blocks.1.mlp.up_proj (own update by Muon)",
    "attention over the root of d while heads grow": "attention logits times root of d 0",
    "attention over d to one and a half": "attention logits times root of d 0",
    "the size of heads grows in any model": "attention logits times root of d 0",
    "a router x at W is named an embedding": "W (as used)",
}


def red(one: Mistake) -> list[str]:
    rows = run(one, one.optimizer, dict(one.keys), one.model)
    return [v.tensor.removeprefix("model.") for v in rows if not v.passes]


@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_that_outputs_hide_turns_its_own_row_red(name: str):
    (one,) = [m for m in MISTAKES if m.name == name]
    found = red(one)
    assert QUICK[name] in found
    if one.optimizer == "adamw":
        assert found == [QUICK[name]], "and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("one", MISTAKES, ids=lambda m: m.name)
def test_every_mistake_that_can_be_seen_is_and_no_other(one: Mistake):
    assert bool(red(one)) is one.visible


def test_the_command_counts_what_is_seen(capsys: pytest.CaptureFixture[str]):
    assert main("a router x at W") == 0
    assert capsys.readouterr().out.endswith("1 of 1 mistakes are seen; 0 cannot be seen\n")
