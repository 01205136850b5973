"""Conversations: lines of JSON, rendered by a chat template, and which of their tokens are learned.

    {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}
    {"prompt": "2 + 3?", "completion": "5"}

A prompt is a turn of the user, its completion one of the assistant; both may be lists of messages, too. What
the assistant says is learned, with the mark that ends its turn. The template tells where that is, if it has
transformers' `{% generation %}` marks. Otherwise a turn is what it adds to the conversation before it, and
the tokens of everything before it must not depend on it.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_trn.train.data.readers import open_unpacked
from delta_trn.train.settings.errors import SourceError, TokenizerError

# For a model that has never seen a conversation: any tokenizer with an end token can spell it.
TURNS = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OWN_TEMPLATE = "give data.chat_template=FILE with a template that marks them by {% generation %}"


@dataclass(frozen=True)
class Conversation:
    """One line of a file. `where` is FILE:LINE; `tools` are those that its template is to describe."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def key(self) -> str:
        """Text that is the same for copies of a conversation."""
        return json.dumps([self.messages, self.tools], sort_keys=True)


@dataclass(frozen=True)
class Rendered:
    """The tokens of a conversation, int32 [n], and bool [n]: which of them are learned."""

    ids: np.ndarray
    learned: np.ndarray


class ChatTokenizer:
    """A tokenizer of transformers with a chat template, for runs in the place of a `TextTokenizer`."""

    turn = "\n"

    def __init__(self, inner: Any, ends: frozenset[int] = frozenset()):
        self.inner = inner  # a PreTrainedTokenizerBase, whose attributes transformers does not declare
        self.has_marks = bool(_MARK.search(inner.get_chat_template()))
        own = {inner.eos_token_id} if inner.eos_token_id is not None else set()
        self.eos: list[int] = sorted(own | ends | self._end_of_turn())
        self.bos: int | None = inner.bos_token_id
        self.pad: int = inner.pad_token_id if inner.pad_token_id is not None else self.eos[0]

    @property
    def size(self) -> int:
        return len(self.inner)

    @property
    def sha256(self) -> str:
        backend = self.inner.backend_tokenizer.to_str()
        return hashlib.sha256((backend + self.inner.get_chat_template()).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a conversation in which the user has said the text, and it is our turn."""
        return self._ids([{"role": "user", "content": text}], add_generation_prompt=True)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def save(self, directory: Path) -> None:
        self.inner.save_pretrained(directory)

    def render(self, conversation: Conversation, *, last_only: bool = False) -> Rendered:
        """Returns a conversation's tokens, and which are learned: the assistant's turns, or the last of them.

        SourceError if the template refuses it, or if it does not tell where the turns are.
        """
        try:
            mark = self._marked if self.has_marks else self._by_prefixes
            ids, learned = mark(conversation, last_only)
        except SourceError:
            raise
        except Exception as error:  # a template may raise anything, jinja2's errors and Python's
            raise SourceError(
                f"{conversation.where}: the chat template refuses it ({type(error).__name__}: {error}); mend "
                "the conversation, or give another template as data.chat_template=FILE"
            ) from error
        if not learned.any():
            raise SourceError(
                f"{conversation.where}: no token is in a turn of the assistant by the chat template; "
                f"{_OWN_TEMPLATE}"
            )
        return Rendered(ids, learned)

    def _marked(self, conversation: Conversation, last_only: bool) -> tuple[np.ndarray, np.ndarray]:
        out: Any = self.inner.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        learned = np.array(out["assistant_masks"], bool)
        if last_only and learned.any():
            end = np.flatnonzero(learned)[-1] + 1
            before = np.flatnonzero(~learned[:end])
            learned[: before[-1] if len(before) else 0] = False
        return np.array(out["input_ids"], np.int32), learned

    def _by_prefixes(self, conversation: Conversation, last_only: bool) -> tuple[np.ndarray, np.ndarray]:
        messages, tools = conversation.messages, conversation.tools
        whole = self._ids(messages, tools=tools)
        learned = np.zeros(len(whole), bool)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers[-1:] if last_only else answers:
            before = self._ids(messages[:i], tools=tools, add_generation_prompt=True)
            until = self._ids(messages[: i + 1], tools=tools)
            if until[: len(before)] != before or whole[: len(until)] != until:
                other = "" if last_only else "; or learn the last turn alone, with data.turns=last"
                raise SourceError(
                    f"{conversation.where}: the chat template renders what is before turn {i + 1} in another "
                    "way once the turn is there, or the turn in another way once others follow, so that "
                    f"nothing tells where it begins and ends; {_OWN_TEMPLATE}{other}"
                )
            learned[len(before) : len(until)] = True
        return np.array(whole, np.int32), learned

    def _ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        out: Any = self.inner.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        return list(out["input_ids"])

    def _end_of_turn(self) -> set[int]:
        """Returns the last special token that the template writes in a turn of the assistant, if any."""
        question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        try:
            before, until = self._ids([question], add_generation_prompt=True), self._ids([question, answer])
        except Exception:  # a template that wants more than this: the tokenizer's own end must do
            return set()
        special = set(self.inner.all_special_ids) | set(self.inner.get_added_vocab().values())
        return set([token for token in until[len(before) :] if token in special][-1:])


def load_chat_tokenizer(folder: Path, template: str | None) -> ChatTokenizer:
    """Loads the tokenizer of a pretrained model. TokenizerError if it, or its chat template, is missing.

    template    file of a Jinja template, `turns`, or None for the tokenizer's own
    """
    from transformers import AutoTokenizer, GenerationConfig

    try:
        inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # what is raised depends on what is missing, and on the version
        raise TokenizerError(
            f"{folder} has no tokenizer that transformers can read ({str(error).splitlines()[0]}); copy the "
            "tokenizer's files there, beside the model"
        ) from error
    if template == "turns":
        inner.chat_template = TURNS
    elif template is not None:
        path = Path(template).expanduser()
        if not path.is_file():
            raise TokenizerError(
                f"data.chat_template={template}: no such file; give a Jinja file, or `turns`"
            )
        inner.chat_template = path.read_text(encoding="utf-8")
    if not inner.chat_template:
        raise TokenizerError(
            f"the tokenizer in {folder} has no chat template; give data.chat_template=FILE with that of the "
            "model's family, or data.chat_template=turns for a plain one"
        )
    if template == "turns" and inner.eos_token is None:
        raise TokenizerError(
            f"the tokenizer in {folder} has no end token, with which data.chat_template=turns ends a turn; "
            "name one as eos_token in its tokenizer_config.json"
        )
    ends: set[int] = set()
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ends = set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    return ChatTokenizer(inner, frozenset(ends))


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yields the conversation of every line that is not blank. SourceError names the first that is none."""
    with open_unpacked(path) as (file, _):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise SourceError(f"{where} is not JSON ({error}); expected one object per line") from error
            if not isinstance(row, dict):
                raise SourceError(f"{where} is {type(row).__name__}, expected an object with messages")
            yield Conversation(where, _messages(row, where), row.get("tools"))


def _is_message(message: Any) -> bool:
    """Returns whether it has a role and says something; calls of tools may stand for content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return message.get("content") is not None or len(message) > 2


def _messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the messages of a row, and checks their form."""
    if "messages" in row:
        messages = row["messages"]
    elif "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        messages = [*messages, *answer] if isinstance(messages, list) and isinstance(answer, list) else None
    else:
        raise SourceError(
            f"{where} has the fields {sorted(row)}; expected messages, or prompt and completion"
        )
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise SourceError(
            f'{where} has no list of messages such as {{"role": "user", "content": "..."}}; mend the line'
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise SourceError(
            f"{where} has no turn of the assistant, so there is nothing to learn; its roles are "
            f"{[message['role'] for message in messages]}: add one, or remove the line"
        )
    return messages
