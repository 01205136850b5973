"""What is given to a reader comes from all rooms, and the same for a seed."""

import pytest

from tools import reading


def test_functions_come_from_all_rooms_in_turn():
    chosen = reading.choose_functions(5, 12)
    rooms = [place.partition(":")[0] for place, _ in chosen]
    assert rooms == 2 * list(reading.ROOMS)
    assert chosen == reading.choose_functions(5, 12) != reading.choose_functions(6, 12)
    for place, text in chosen:
        assert place.rpartition(" ")[2] in text and text.count("\n") + 1 >= reading.LEAST_LINES


def test_sentences_come_from_docstrings_comments_and_pages(tmp_path):
    module, page = tmp_path / "a.py", tmp_path / "b.md"
    module.write_text(
        '"""The first sentence has six words. Short.\n\n'
        "    x = a table, which is no sentence\n\n"
        'The end of it is a sentence again.\n"""\n'
        "x = 1  # a comment that goes on here\n# over a second line of code\ny = 2\n"
    )
    page.write_text(
        "# No heading is a sentence here\n\nA page has one\nof six words.\n\n```\nx y z a b c d\n```\n"
    )
    assert list(reading.sentences_of(module)) == [
        (1, "The first sentence has six words."),
        (1, "The end of it is a sentence again."),
        (7, "a comment that goes on here"),
        (8, "over a second line of code"),
    ]
    assert list(reading.sentences_of(page)) == [(3, "A page has one of six words.")]
    assert len(reading.choose_sentences(5, 60)) == 60


def test_the_command_prints_both(capsys):
    assert reading.main(["3", "--functions", "6", "--sentences", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("==== ") == 6 and "\n  4  " in out
    with pytest.raises(SystemExit):
        reading.main(["seed"])
