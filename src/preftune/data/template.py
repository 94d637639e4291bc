"""From text or chat messages to token ids with the exact mask of what the assistant says.

The mask is made while tokens are emitted: the conversation is cut, as text, where the template starts and ends each
assistant turn, and each piece is tokenised by itself. So a prompt has the same ids for every completion, for the
reference and for inference, and no token ever straddles the boundary of a completion.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from preftune.data.formats import RowError
from preftune.errors import ModelError, nearest
from preftune.types import Completion, Example, Message, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Small templates for tokenizers that bring none. Written to be prefix-stable: earlier turns never change.
NAMED_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + "
        "(eos_token if m['role'] == 'assistant' else '') + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
}


def resolve_chat_template(value: str) -> str:
    """Return the text of a chat template given by name (`chatml`, `plain`), by file, or as the text itself."""
    if value in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[value]
    if "{" in value:
        return value
    path = Path(os.path.expanduser(value))
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"model.chat_template: {value!r} cannot be read ({error})") from None
    names = ", ".join(NAMED_TEMPLATES)
    raise ModelError(
        f"model.chat_template: {value!r} is neither a name ({names}){nearest(value, NAMED_TEMPLATES)}, "
        "nor a file, nor template text"
    )


@dataclass(frozen=True)
class Turns:
    """A conversation cut into pieces of text; `scored[i]` says whether piece i is the assistant's."""

    pieces: list[str]
    scored: list[bool]


class RowTokenizer:
    """Turns examples into token ids with one tokenizer. Raises `RowError` for a row the template cannot express."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special = set(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no end-of-sequence token, so a completion could never end; set one")
        plain = self._ids("a")
        self.bos = cast("list[int]", tokenizer("a")["input_ids"])[: 1 if tokenizer("a")["input_ids"] != plain else 0]
        if self.bos != [tokenizer.bos_token_id]:
            self.bos = []

    def tokenize(self, example: Example) -> tuple[tuple[int, ...], tuple[Completion, ...]]:
        """Return the prompt's ids, and each completion with its mask."""
        if isinstance(example.prompt, str):
            prompt = tuple(self._plain_prompt(example.prompt))
            return prompt, tuple(self._plain_completion(cast("str", c)) for c in example.completions)
        header = self.render(example.prompt, generation=True)
        prompt = tuple(self._ids(header))
        if not prompt:
            raise RowError("the prompt has no tokens")
        chats = [self._chat_completion(example.prompt, header, cast("list[Message]", c)) for c in example.completions]
        return prompt, tuple(chats)

    def render(self, messages: list[Message], generation: bool) -> str:
        """The template's text of the messages, with or without the opening of an assistant turn."""
        import jinja2

        if self.tokenizer.chat_template is None:
            raise ModelError(
                "the tokenizer has no chat template and the data holds chat messages; set model.chat_template to a "
                f"name ({', '.join(NAMED_TEMPLATES)}), a file, or the text of one"
            )
        try:
            return cast(
                "str",
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation),
            )
        except Exception as error:  # a template is a program: besides its own errors it raises whatever Python does
            hint = ""
            if messages[0]["role"] == "system" and isinstance(error, jinja2.TemplateError):
                hint = "; where it refuses a system turn, put that text into the first user turn"
            raise RowError(
                "refused by the chat template", f"the chat template refuses this row: {error}{hint}"
            ) from None

    def _ids(self, text: str) -> list[int]:
        try:
            return cast("list[int]", self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, UnicodeError):
            detail = "the text holds half a character (a lone surrogate such as \\ud800), which no tokenizer takes"
            raise RowError("text that is not Unicode", detail) from None

    def _plain_prompt(self, text: str) -> list[int]:
        ids = self._ids(text)
        if self.bos and ids[:1] != self.bos:
            ids = self.bos + ids
        self._require_no_bos(ids[1:], "the prompt")
        if not ids:
            raise RowError("the prompt has no tokens")
        return ids

    def _require_no_bos(self, ids: list[int], where: str) -> None:
        if self.bos and self.bos[0] in ids:
            token = self.tokenizer.decode(self.bos)
            raise RowError(
                "a second beginning of sequence",
                f"{where} holds {token!r} in its text; the tokenizer puts it at the start, remove the others",
            )

    def _plain_completion(self, text: str) -> Completion:
        ids = self._ids(text)
        self._require_no_bos(ids, "the answer")
        end = cast("int", self.tokenizer.eos_token_id)
        if ids[-2:] == [end, end]:
            raise RowError("two ends of turn", f"the answer ends in two {self.tokenizer.decode([end])!r}; remove one")
        if ids[-1:] != [end]:
            ids.append(end)
        return Completion(tuple(ids), (True,) * len(ids))

    def _chat_completion(self, prompt: list[Message], header: str, turns: list[Message]) -> Completion:
        ids: list[int] = []
        mask: list[bool] = []
        so_far, messages = header, list(prompt)
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                if index:  # the opening of this turn, after whatever the user said, is context
                    opening = self.render(messages, generation=True)
                    between = self._ids(_rest(opening, so_far))
                    ids, mask, so_far = ids + between, mask + [False] * len(between), opening
                messages.append(turn)
                text = self.render(messages, generation=False)
                said, after = self._turn(_rest(text, so_far), turn["content"], prompt)
                ids, mask, so_far = ids + said + after, mask + [True] * len(said) + [False] * len(after), text
            else:
                messages.append(turn)
        while mask and not mask[-1]:  # nothing after the last end of turn is scored, so it need not be run
            ids.pop()
            mask.pop()
        return Completion(tuple(ids), tuple(mask))

    def _turn(self, text: str, content: str, prompt: list[Message]) -> tuple[list[int], list[int]]:
        """Split the ids of a rendered assistant turn after its end-of-turn token."""
        if not text.lstrip().startswith(content.strip()[:20]) and not self._opens_turns(prompt):
            raise RowError(
                "the chat template does not open the assistant's turn",
                f"the chat template has no generation prompt and puts {text[:20]!r} before the answer, so the model "
                "would be trained on its own header; give model.chat_template one with add_generation_prompt",
            )
        ids = self._ids(text)
        end = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in self.special), -1)
        trailing = self.tokenizer.decode(ids[end + 1 :]) if end >= 0 else text
        if end < 0 or str(trailing).strip():
            raise RowError(
                "the chat template does not end the assistant's turn",
                f"the chat template ends the answer with {text[-20:]!r}, not with a special token, so the model would "
                "never learn to stop; give model.chat_template one that ends assistant turns",
            )
        if end and ids[end - 1] == ids[end]:
            raise RowError(
                "two ends of turn",
                f"the answer ends in two {self.tokenizer.decode([ids[end]])!r}; remove the one in the text",
            )
        return ids[: end + 1], ids[end + 1 :]

    def _opens_turns(self, prompt: list[Message]) -> bool:
        return self.render(prompt, generation=True) != self.render(prompt, generation=False)


def _rest(text: str, prefix: str) -> str:
    """What follows `prefix` in `text`; a template that rewrites earlier turns is an error that shows the place."""
    if text.startswith(prefix):
        return text[len(prefix) :]
    at = len(os.path.commonprefix([text, prefix]))
    raise RowError(
        "the chat template rewrites the prompt",
        "the chat template's text of prompt + answer does not start with its text of the prompt; they differ after "
        f"{text[max(0, at - 30) : at]!r}: prompt goes on {prefix[at : at + 40]!r}, whole text {text[at : at + 40]!r}",
    )


def is_chat(text: Text) -> bool:
    """Whether a prompt or completion is given as chat messages."""
    return not isinstance(text, str)
