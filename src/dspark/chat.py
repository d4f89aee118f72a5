"""One path from a conversation to token ids, shared by answers, training, evaluation and serving.

A drafter learns the target's habits on exact token sequences. If training renders a conversation in one way and serving
in another (another system prompt, a think block, a newline after the end token), it drafts for a model that nobody
runs; so everything that turns messages into ids goes through :class:`ChatFormat`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dspark.errors import ConfigError, DataError, ModelError
from dspark.models.weights import load_tokenizer

Message = Mapping[
    str, Any
]  # {"role": "user", "content": "..."}; Any: tool calls and the like are the template's affair
REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no UTF-8 (yet)
PROBE = "dspark-probe-answer"
PROBE_ANSWER = {"role": "assistant", "content": PROBE}


@dataclass(frozen=True, kw_only=True)
class EncodedConversation:
    """Ids of a conversation and, for each, whether it is supervised: an assistant's text and its end token are."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise DataError(
                f"{len(self.token_ids)} token ids but {len(self.loss_mask)} loss mask entries; give one per id"
            )


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """What stands before a user's first turn, and the tokens that end it (with the model's stop tokens)."""

    prefix_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]  # ascending


class ChatFormat:
    """How a model's conversations become ids and ids become text.

    With a chat template, messages are rendered by it. Without one (a base model) the mode is plain text: the prompt is
    the contents of the messages joined by blank lines, encoded with whatever the tokenizer puts in front of a text (its
    BOS, if it has one); roles are not rendered. An answer follows the prompt's ids directly and is closed by the
    tokenizer's end token. ``stop_token_ids`` is ascending: the ids of the generation config (else the tokenizer's end
    token), and the token that the template closes an assistant's turn with.
    """

    def __init__(
        self,
        tokenizer: Any,  # Any: transformers has no one type for fast and slow tokenizers
        *,
        eos_token_ids: Sequence[int] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        """``eos_token_ids`` come from the generation config. ``template_options`` are passed to the chat template every
        time (``enable_thinking=False``): one setting for training and serving."""
        self.tokenizer, self._backend = tokenizer, _backend_of(tokenizer)
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.template_options = dict(template_options or {})
        self._check_options()
        stops = set(eos_token_ids)
        if not stops and tokenizer.eos_token_id is not None:
            stops.add(tokenizer.eos_token_id)
        self._header = ""
        self.end_token_id: int | None = tokenizer.eos_token_id  # what closes an answer
        if self.has_template:
            self._header = self._missing_header()
            turn_end = self._token_after_probe([{"role": "user", "content": "a"}, PROBE_ANSWER])
            if turn_end is not None:
                stops.add(turn_end)
                self.end_token_id = turn_end
        self.stop_token_ids = tuple(sorted(stops))

    @classmethod
    def from_folder(
        cls,
        folder: Path | str,
        *,
        trust_remote_code: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> ChatFormat:
        """The format of a model's folder: its tokenizer and the stop ids of its generation config."""
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        return cls(tokenizer, eos_token_ids=read_eos_token_ids(folder), template_options=template_options)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids that a model is to continue with its answer. Raises :class:`DataError` for malformed messages."""
        check_messages(messages)
        if self.has_template:
            return self._encode(self._render(messages, generation_prompt=True))
        text = "\n\n".join(message["content"] for message in messages)
        return list(self.tokenizer(text, add_special_tokens=True)["input_ids"])

    def user_turn(self) -> UserTurn:
        """Where a user's first turn lies: the model that continues ``prefix_ids`` writes one, up to an end token.

        Raises :class:`ModelError` if there is no template, or none that puts anything before a user's text.
        """
        if not self.has_template:
            raise ModelError("the tokenizer has no chat template, so where a user speaks is unknown; give prompts")
        messages = [{"role": "user", "content": PROBE}]
        prefix = self._encode(self._render(messages).partition(PROBE)[0])
        if not prefix:
            raise ModelError("the chat template puts nothing before a user's text; give prompts")
        end = self._token_after_probe([*messages, {"role": "assistant", "content": "a"}])
        ends = {*self.stop_token_ids} | ({end} if end is not None else set())
        return UserTurn(prefix_ids=tuple(prefix), end_token_ids=tuple(sorted(ends)))

    def conversation_ids(self, messages: Sequence[Message], *, last_only: bool = False) -> EncodedConversation:
        """Ids of a whole conversation with every assistant's turn supervised, end token included.

        ``last_only`` supervises the last answer alone, and asks nothing of those before it. What the template puts
        after an end token (a newline) is not supervised, and is left out after the last turn: nobody generates it.
        Raises :class:`DataError` if the template renders a supervised turn in another way once it lies in the past
        (think blocks dropped), or if a token reaches across the border of a turn; then the ids seen in training would
        not be those seen in decoding.
        """
        check_messages(messages)
        if not self.has_template:
            return self._plain_conversation(messages)
        text = self._render(messages, generation_prompt=False)
        token_ids = self._encode(text)
        mask = [False] * len(token_ids)
        end = len(token_ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or (last_only and i < len(messages) - 1):
                continue
            if i == 0:
                raise DataError("the conversation begins with an assistant message; put the user's before it")
            start = self._border(messages, i, text, token_ids, generation_prompt=True)
            stop = self._border(messages, i + 1, text, token_ids, generation_prompt=False)
            # decoding stops at the first stop token, whether the template or the message wrote it
            stop = next((k + 1 for k in range(start, stop) if token_ids[k] in self.stop_token_ids), stop)
            mask[start:stop] = [True] * (stop - start)
            if i == len(messages) - 1:
                end = stop
        return EncodedConversation(token_ids=tuple(token_ids[:end]), loss_mask=tuple(mask[:end]))

    def training_conversations(self, messages: Sequence[Message]) -> list[EncodedConversation]:
        """A conversation as training wants it: whole where every turn stays as it was, else once per answer.

        Templates of thinking models drop the thoughts of past answers. There an answer is seen in decoding behind a
        text without the thoughts before it, and so it must be in training. Raises :class:`DataError` as
        :meth:`conversation_ids` does if not even that can be had, and for a conversation without an answer.
        """
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise DataError("the conversation has no assistant message, so there is nothing to learn")
        try:
            return [self.conversation_ids(messages[: answers[-1] + 1])]
        except DataError:
            if len(answers) == 1:
                raise
            return [self.conversation_ids(messages[: i + 1], last_only=True) for i in answers]

    def training_example(self, prompt_messages: Sequence[Message], answer_ids: Sequence[int]) -> EncodedConversation:
        """A prompt and the very ids that the target answered with, all of them supervised.

        Answers are kept as ids because text does not tell them: a sampled sequence need not be the one the tokenizer
        would choose. An answer cut by a length limit has no end token, and none is added.
        """
        prompt = self.prompt_ids(prompt_messages)
        mask = (False,) * len(prompt) + (True,) * len(answer_ids)
        return EncodedConversation(token_ids=(*prompt, *answer_ids), loss_mask=mask)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, by default without special tokens; spaces stay as they are."""
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """A fresh detokeniser for one answer."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)

    def _plain_conversation(self, messages: Sequence[Message]) -> EncodedConversation:
        if len(messages) < 2 or [m["role"] for m in messages].index("assistant") != len(messages) - 1:
            raise DataError(
                "the tokenizer has no chat template; without one a training conversation is a prompt and then one "
                "assistant message"
            )
        answer = list(self.tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"])
        if self.tokenizer.eos_token_id is not None:
            answer.append(self.tokenizer.eos_token_id)
        return self.training_example(messages[:-1], answer)

    def _border(
        self, messages: Sequence[Message], count: int, text: str, token_ids: list[int], *, generation_prompt: bool
    ) -> int:
        """Number of ids that the first ``count`` messages take, checked to begin the whole conversation."""
        part = self._render(messages[:count], generation_prompt=generation_prompt)
        if not text.startswith(part):
            raise DataError(
                f"the chat template renders message {count} differently inside the whole conversation; train on each "
                "answer as a conversation of its own"
            )
        prefix = self._encode(part)
        if token_ids[: len(prefix)] != prefix:
            raise DataError(
                f"a token reaches across the border before message {count + 1} of the conversation, so its ids in "
                "training would differ from those in decoding; leave the conversation out"
            )
        return len(prefix)

    def fingerprint(self) -> str:
        """Hash of all that decides which ids a text or a conversation gets: vocabulary, rules, template, options."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        names = ("transformers", "tokenizers", "jinja2")  # another version may render or split otherwise
        versions = [importlib.metadata.version(name) for name in names]
        template = getattr(self.tokenizer, "chat_template", None)
        parts = [rules, template, self.template_options, self.stop_token_ids, type(self.tokenizer).__name__, versions]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _check_options(self) -> None:
        """Refuse an option that the template does not know: it would change nothing, in silence."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        template = "\n".join(template.values()) if isinstance(template, dict) else template
        for name in self.template_options:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ConfigError(
                    f"template_options has {name!r}, which the model's chat template does not read; leave it out"
                )

    def _missing_header(self) -> str:
        """What the template puts before an answer and yet leaves out when asked for it; mostly nothing.

        Some templates do not read ``add_generation_prompt``. A space at the end belongs to the answer's first token.
        """
        user = [{"role": "user", "content": "a"}]
        try:
            before, asked = self._render(user), self._render(user, generation_prompt=True)
            whole = self._render([*user, PROBE_ANSWER])
        except DataError as error:
            raise ModelError(f"the model's chat template is unusable: {error}") from None
        if before != asked or not whole.startswith(before):
            return ""
        return whole[len(before) :].partition(PROBE)[0].rstrip(" ")

    def _token_after_probe(self, messages: Sequence[Message]) -> int | None:
        """Id of the special token that the template puts behind the probe in a conversation; None if there is none."""
        tail = self._encode(self._render(messages).rpartition(PROBE)[2].lstrip())
        added = self.tokenizer.added_tokens_decoder
        return tail[0] if tail and tail[0] in added and added[tail[0]].special else None

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.template_options,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from None
        return text + self._header if generation_prompt else text

    def _encode(self, text: str) -> list[int]:
        # the template has put every special token into the text already
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class TextStream:
    """Text of an answer while its ids arrive; whatever may still change is held back.

    A token may end inside a character, and decoders look at neighbours (leading spaces, runs of bytes). So the ids
    since the last safe point are decoded together with those just before it, and text is given out only if it does not
    end in a replacement character. All pieces, the flush included, join to the text of all ids.
    """

    def __init__(self, chat: ChatFormat, *, skip_special_tokens: bool = True) -> None:
        self._chat, self._skip = chat, skip_special_tokens
        self._window: list[int] = []  # [context that is already out | pending ids]
        self._context = 0  # ids of the window that are already out

    def push(self, *token_ids: int) -> str:
        """Text that became certain with these ids; may be empty."""
        self._window.extend(token_ids)
        new = self._new_text()
        if not new or new.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        return new

    def flush(self) -> str:
        """What is still held back, as it stands; the stream is empty afterwards."""
        new = self._new_text()
        self._window, self._context = [], 0
        return new

    def _new_text(self) -> str:
        before = self._chat.decode(self._window[: self._context], skip_special_tokens=self._skip)
        return self._chat.decode(self._window, skip_special_tokens=self._skip)[len(before) :]


def _backend_of(tokenizer: Any) -> Any | None:  # Any: see ChatFormat
    """What decodes for a tokenizer that adds nothing of its own to it, at a tenth of the time; None for others."""
    from transformers import PreTrainedTokenizerFast

    own = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    alike = (getattr(type(tokenizer), "decode", None), getattr(type(tokenizer), "_decode", None)) == own
    return tokenizer.backend_tokenizer if alike else None


def check_messages(messages: Sequence[Message]) -> None:
    """Raise :class:`DataError` unless there is a message, and each has a role and a text."""
    if not messages:
        raise DataError("the conversation has no messages; give at least one")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise DataError(
                    f'message {i} has no text under "{key}"; it must look like {{"role": ..., "content": ...}}'
                )


def read_eos_token_ids(folder: Path | str) -> tuple[int, ...]:
    """Stop ids of a folder's generation_config.json, which holds one or a list; empty if it names none."""
    path = Path(folder) / "generation_config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again") from None
    values: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) for v in values):
        raise ModelError(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return tuple(values)
