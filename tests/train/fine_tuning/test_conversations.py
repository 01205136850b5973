"""Conversations: what of them is learned, how they lie in rows, and what is refused before training."""

import json
from itertools import pairwise

import numpy as np
import pytest

from delta_trn.train.data.conversations import Conversation, load_chat_tokenizer, read_conversations
from delta_trn.train.data.packing import ConversationLoader, load_conversations, pack
from delta_trn.train.data.tokenizer import plain_bytes
from delta_trn.train.settings.errors import DataError, PositionMismatch, SourceError, TokenizerError
from delta_trn.train.settings.schema import DataSection
from tests.support.chats import CHATML, MARKED, sums, turns, write


@pytest.fixture
def tokenizer(tmp_path):
    """Returns a function of a template: the tokenizer of bytes with it."""

    def load(template):
        plain_bytes().save(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return load_chat_tokenizer(tmp_path, None)

    return load


def conversation(*texts):
    return Conversation("file:1", turns(*texts)["messages"])


class TestMask:
    """Each byte is a token, so that a rendered text can be laid beside what is learned of it, by hand."""

    @pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by marks"])
    @pytest.mark.parametrize("last_only", [False, True])
    def test_it_has_the_assistants_turns_with_their_ends_and_nothing_else(
        self, tokenizer, template, last_only
    ):
        loaded = tokenizer(template)
        assert loaded.has_marks == (template is MARKED)
        rendered = loaded.render(conversation("1+1?", "2", "3?", "33"), last_only=last_only)
        text = "<user>1+1?</><assistant>2</><user>3?</><assistant>33</>"
        hand = "                        ####                      #####"
        if last_only:
            hand = hand.replace("####  ", "      ", 1)
        assert bytes(rendered.ids.astype(np.uint8)).decode() == text
        assert "".join("#" if x else " " for x in rendered.learned) == hand

    def test_the_plain_template_ends_what_is_learned_with_the_end_token(self, tmp_path):
        plain_bytes().save(tmp_path)
        loaded = load_chat_tokenizer(tmp_path, "turns")
        rendered = loaded.render(conversation("1?", "2"))
        assert loaded.decode(rendered.ids) == "<|user|>\n1?\n<|assistant|>\n2\n"
        assert rendered.ids[0] == 256 and rendered.ids[rendered.learned].tolist() == [ord("2"), 257]
        assert loaded.eos == [257]

    def test_the_mark_that_ends_a_turn_ends_generation_too(self, tmp_path):
        plain_bytes().save(tmp_path)
        template = tmp_path / "ends_with_pad.jinja"
        template.write_text(CHATML.replace("</>", "<|pad|>"))
        assert load_chat_tokenizer(tmp_path, str(template)).eos == [257, 258]

    def test_turns_that_change_once_others_follow_are_refused_unless_the_last_alone_is_learned(
        self, tokenizer
    ):
        """As Qwen3's template has them, which drops the thoughts of earlier turns."""
        thoughts = CHATML.replace(
            "m.content", "('(hm)' if loop.last and m.role != 'user' else '') + m.content"
        )
        loaded, two = tokenizer(thoughts), conversation("1+1?", "2", "3?", "33")
        with pytest.raises(SourceError, match=r"turn 2.*data.turns=last"):
            loaded.render(two)
        rendered = loaded.render(two, last_only=True)
        assert loaded.decode(rendered.ids[rendered.learned]) == "(hm)33</>"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content }}{% generation %}{% endgeneration %}", "no token is in a turn"),
        ],
    )
    def test_a_conversation_that_its_template_refuses_is_named(self, tokenizer, template, message):
        with pytest.raises(SourceError, match=f"file:1.*{message}"):
            tokenizer(template).render(conversation("1", "2"))

    @pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "1+1?"}]])
    def test_a_prompt_and_its_completion_are_two_turns(self, tmp_path, prompt):
        path = write(tmp_path / "pairs.jsonl", [{"prompt": prompt, "completion": "2"}])
        (only,) = read_conversations(path)
        assert only.messages == turns("1+1?", "2")["messages"]


class TestRows:
    def test_every_item_is_in_one_row_and_no_row_is_too_full(self):
        lengths = np.random.default_rng(0).integers(1, 60, 500).tolist()
        rows = pack(lengths, 64)
        assert sorted(i for row in rows for i in row) == list(range(500))
        full = [sum(lengths[i] for i in row) for row in rows]
        assert max(full) <= 64 and len(rows) <= 1.06 * sum(lengths) / 64 + 1

    @pytest.fixture
    def dataset(self, tmp_path):
        plain_bytes().save(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        data = DataSection(source=str(sums(tmp_path / "sums.jsonl")), val_fraction=0.1)
        return load_conversations(data, tmp_path, 96)

    def test_a_row_is_whole_conversations_each_counted_from_0_with_targets_of_its_own(self, dataset):
        rows, seen = dataset.rows("train"), []
        for ids, targets, places in zip(rows.ids, rows.targets, rows.places, strict=True):
            starts = [*np.flatnonzero(places == 0), len(ids)]
            for begin, end in pairwise(starts):
                assert places[begin:end].tolist() == list(range(end - begin))
                seen.append((ids[begin:end].tolist(), targets[begin:end].tolist()))
        padding = [ids for ids, targets in seen if set(targets) == {-100}]
        assert all(set(ids) == {dataset.tokenizer.pad} for ids in padding)
        expected = [
            (d.ids[:-1].tolist(), np.where(d.learned[1:], d.ids[1:], -100).tolist())
            for d in dataset.documents["train"]
        ]
        assert sorted(pair for pair in seen if pair[0] not in padding) == sorted(expected)

    def test_ranks_share_an_epochs_rows_and_a_position_is_returned_to(self, dataset):
        count = len(dataset.rows("train").ids)
        ranks = [ConversationLoader(dataset, batch=1, seed=3, rank=r, world=2) for r in range(2)]
        drawn = [rank.next_batch().inputs[0].tolist() for _ in range(count) for rank in ranks]
        every = sorted(dataset.rows("train").ids.tolist())
        assert sorted(drawn[:count]) == every == sorted(drawn[count : 2 * count])
        assert drawn[:count] != drawn[count : 2 * count], "an epoch has an order of its own"
        one = ConversationLoader(dataset, batch=2, seed=3)
        for _ in range(3):
            one.next_batch()
        again = ConversationLoader(dataset, batch=1, seed=3)
        again.load_state_dict(one.state_dict())
        assert again.next_batch().inputs[0].tolist() == drawn[6]
        with pytest.raises(PositionMismatch, match="seed"):
            ConversationLoader(dataset, batch=1, seed=4).load_state_dict(one.state_dict())

    def test_copies_of_a_conversation_are_held_out_together(self, tmp_path):
        plain_bytes().save(tmp_path)
        rows = [turns(str(i % 5), "yes") for i in range(50)]
        data = DataSection(
            source=str(write(tmp_path / "a.jsonl", rows)), val_fraction=0.2, chat_template="turns"
        )
        dataset = load_conversations(data, tmp_path, 64)
        assert [len(dataset.documents[split]) for split in ("train", "val")] == [40, 10]
        apart = data.model_copy(update={"validation": str(write(tmp_path / "b.jsonl", rows[:1]))})
        dataset = load_conversations(apart, tmp_path, 64)
        assert [len(dataset.documents[split]) for split in ("train", "val")] == [40, 1]
        assert "10 left out, since they are held out" in dataset.describe()


class TestTooLong:
    @pytest.fixture
    def load(self, tmp_path):
        plain_bytes().save(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(CHATML)
        rows = [turns("q" * n, "a" * 9) for n in (1, 2, 3, 20, 40)]
        held_out = str(write(tmp_path / "b.jsonl", [turns("x", "y")]))
        source = str(write(tmp_path / "a.jsonl", rows))

        def load(too_long, length=40):
            data = DataSection(source=source, validation=held_out, too_long=too_long)
            return load_conversations(data, tmp_path, length)

        return load

    def test_they_are_refused_with_the_length_that_all_fit(self, load):
        with pytest.raises(SourceError, match=r"2 of 5 .*a.jsonl:4 the first.*batch.length=(\d+)") as error:
            load("refuse")
        enough = int(str(error.value).partition("give batch.length=")[2].split()[0])
        assert len(load("refuse", enough).documents["train"]) == 5
        with pytest.raises(SourceError):
            load("refuse", enough - 1)

    def test_what_was_done_with_them_is_counted_and_said(self, load):
        truncated = load("truncate")
        assert truncated.dealt_with == {"truncated": 1, "dropped, being too long": 1}  # one loses its answer
        assert max(len(d.ids) for d in truncated.documents["train"]) == 41
        assert "1 truncated" in truncated.describe()
        assert load("drop").dealt_with == {"dropped, being too long": 2}
        with pytest.raises(SourceError, match="nothing is left to learn"):
            load("drop", 5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is list, expected an object"),
        ('{"text": "a"}', r"has the fields \['text'\]; expected messages"),
        ('{"messages": "a"}', "has no list of messages"),
        ('{"messages": [{"content": "a"}]}', "has no list of messages"),
        (json.dumps({"messages": turns("a")["messages"]}), "has no turn of the assistant"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(turns('a', 'b'))}\n\n{row}\n")
    with pytest.raises(SourceError, match=rf"a.jsonl:3.*{message}"):
        list(read_conversations(path))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], SourceError, "has no conversation to use"),
        ([turns("a", "b")], SourceError, "one conversation, which cannot be learned and held out"),
        (None, SourceError, "no such file; give a file of JSON lines"),
    ],
)
def test_a_file_with_nothing_to_learn_is_refused(tmp_path, rows, error, message):
    plain_bytes().save(tmp_path)
    path = tmp_path / "a.jsonl"
    if rows is not None:
        write(path, rows)
    data = DataSection(source=str(path), chat_template="turns")
    with pytest.raises(error, match=message):
        load_conversations(data, tmp_path, 64)


def test_a_tokenizer_without_a_template_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(TokenizerError, match="has no tokenizer that transformers can read"):
        load_chat_tokenizer(tmp_path, None)
    plain_bytes().save(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no chat template; give data.chat_template=FILE.*turns"):
        load_chat_tokenizer(tmp_path, None)
    with pytest.raises(DataError, match="no such file; give a Jinja file"):
        load_chat_tokenizer(tmp_path, str(tmp_path / "missing.jinja"))
