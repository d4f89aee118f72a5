"""What is sent back: answers in OpenAI's shapes, whole or in chunks, built from the engine's events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring  # a string as JSON, beyond ASCII as it is
from typing import Any

import dspark
from dspark.serve.api.config import ServedModel
from dspark.serve.api.errors import ApiError, bad_request, internal
from dspark.serve.api.requests import Plan, Prompt
from dspark.serve.api.schemas import ChatRequest
from dspark.serve.api.tokens import Alignment, Placed, TokenNames
from dspark.serve.events import StepEvent, TokenLogprobs

LEAST_LOGPROB = -9999.0  # what stands for minus infinity, which JSON has not; OpenAI's number
FINISH = {"stop": "stop", "length": "length", "context": "length"}
MARK = "\0text\0"  # where a chunk's text goes
DRAFT, OWN = "draft", "own"  # whose a token was: accepted from the drafter, or drawn by the target


@dataclass(frozen=True)
class Said:
    """What an event says of one token."""

    kind: str  # DRAFT or OWN
    logprobs: TokenLogprobs | None


@dataclass(kw_only=True)
class Delta:
    """What one event adds to an answer."""

    text: str
    tokens: list[Placed[Said]] = field(default_factory=list)  # those whose text is out now, if they are followed
    pieces: list[list[str]] = field(default_factory=list)  # the text by origin, [kind, text] each
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One answer under way."""

    def __init__(self, plan: Plan, index: int, model: ServedModel, names: TokenNames) -> None:
        self.index, self._plan, self._names = index, plan, names
        self.prompt: Prompt = plan.prompt_of(index)
        self._chat = isinstance(plan.body, ChatRequest)
        self._wants = plan.choices[index].logprobs is not None
        options = plan.body.stream_options
        self._shows_drafts = bool(options and options.include_drafts)
        self._follows = self._wants or self._shows_drafts
        self._aligned: Alignment[Said] = Alignment(model.chat, skip_special_tokens=plan.skip_special_tokens)
        self._echo_length = len(self.echo_text(model)) if plan.echo else 0
        self.text: list[str] = []
        self.tokens: list[Placed[Said]] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.finish_reason: str | None = None
        self.last: StepEvent | None = None
        self._opened = self._begun = False
        self.drafted = self.verified = self.accepted = self.rounds = 0

    @property
    def plain(self) -> bool:
        """Whether its chunks differ in their text alone, while it goes on."""
        return not self._follows

    def opens(self) -> bool:
        """Whether the chunk before the answer's text is to be sent now; true once.

        An echo that has log-probabilities waits for them; they are there with the first token at the latest.
        """
        waits = self._plan.echo and self._wants and self.prompt_logprobs is None and not self._begun
        opens, self._opened = not (self._opened or waits), self._opened or not waits
        return opens

    def take(self, event: StepEvent) -> Delta:
        """Add an event. Raises :class:`ApiError` if the engine gave the request up."""
        if event.finish_reason not in (None, *FINISH):
            raise _failed(event)
        self.last = event
        self.drafted += event.drafted
        self.verified += event.verify_len
        self.accepted += event.accepted
        self.rounds += bool(event.token_ids and self._begun)  # the first token comes without a round
        self._begun = self._begun or bool(event.token_ids)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        delta = Delta(text="") if self._plan.silent else self._delta(event)
        if event.finish_reason is not None:
            self.finish_reason = "length" if self._plan.silent else FINISH[event.finish_reason]
            delta.finish_reason = self.finish_reason
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.token_ids.extend(delta.token_ids)
        return delta

    def _delta(self, event: StepEvent) -> Delta:
        if not self._follows:
            return Delta(text=event.text, token_ids=event.token_ids)
        logprobs: Sequence[TokenLogprobs | None] = event.logprobs if self._wants else [None] * len(event.token_ids)
        kinds = [DRAFT if i < event.accepted else OWN for i in range(len(event.token_ids))]
        said = [Said(kind, one) for kind, one in zip(kinds, logprobs, strict=True)]
        self._aligned.push(event.token_ids, said)
        pieces = [[one.kind, piece] for one, piece in self._aligned.pieces(event.text)]
        if event.finish_reason is None:
            tokens = self._aligned.release(event.text)
        else:
            stopped = event.finish_reason == "stop"
            token = stopped and not isinstance(event.stop_reason, str)
            tokens = self._aligned.finish(event.text, cut=stopped and not token, stop_token=token)
        return Delta(text=event.text, tokens=tokens, pieces=pieces, token_ids=event.token_ids)

    def echo_text(self, model: ServedModel) -> str:
        """The prompt as text."""
        return self.prompt.text if self.prompt.text is not None else model.chat.decode(self.prompt.ids)

    def logprobs(self, tokens: Sequence[Placed[Said]]) -> dict[str, Any] | None:
        """The log-probabilities of some of the answer's tokens, as the endpoint shapes them; None if not asked for."""
        if not self._wants:
            return None
        pairs = [(token.payload.logprobs, token.start) for token in tokens if token.payload.logprobs is not None]
        if self._chat:
            return {"content": [self._chat_logprobs(one) for one, _ in pairs], "refusal": None}
        return self._lists([(one, self._echo_length + start) for one, start in pairs])

    def echo_logprobs(self, model: ServedModel) -> dict[str, Any] | None:
        """Those of the prompt's tokens; its first has none."""
        if not self._wants:
            return None
        places: Alignment[None] = Alignment(model.chat, skip_special_tokens=self._plan.skip_special_tokens)
        places.push(self.prompt.ids, [None] * len(self.prompt.ids))
        placed = places.finish("", cut=False, stop_token=False)
        first = {
            "text_offset": [0],
            "token_logprobs": [None],
            "tokens": [self._names.text(self.prompt.ids[0])],
            "top_logprobs": [None],
        }
        rest = self._lists(
            [(one, place.start) for one, place in zip(self.prompt_logprobs or (), placed[1:], strict=True)]
        )
        return joined_logprobs([first, rest])

    def _chat_logprobs(self, one: TokenLogprobs) -> dict[str, Any]:
        return {
            **self._named(one.token_id, one.logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in one.top],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.text(token_id),
            "logprob": _finite(logprob),
            "bytes": self._names.bytes(token_id),
        }

    def _lists(self, pairs: Sequence[tuple[TokenLogprobs, int]]) -> dict[str, Any]:
        """The older shape: parallel lists, alternatives as objects in which tokens of equal text share a key."""
        tops: list[dict[str, float]] = []
        for one, _ in pairs:
            top: dict[str, float] = {}
            for token_id, logprob in (*one.top, (one.token_id, one.logprob)):  # the chosen token is always among them
                top.setdefault(self._names.text(token_id), _finite(logprob))
            tops.append(top)
        return {
            "text_offset": [start for _, start in pairs],
            "token_logprobs": [_finite(one.logprob) for one, _ in pairs],
            "tokens": [self._names.text(one.token_id) for one, _ in pairs],
            "top_logprobs": tops,
        }

    def drafts(self, event: StepEvent, delta: Delta) -> dict[str, Any] | None:
        """Ours: how an event's drafts fared, and its text by origin; None if not asked for.

        ``pieces`` are [kind, text] and join to the chunk's text.
        """
        if not self._shows_drafts:
            return None
        return {
            "drafted": event.drafted,
            "verified": event.verify_len,
            "accepted": event.accepted,
            "pieces": delta.pieces,
            "rejected": [self._names.text(token_id) for token_id in event.rejected_ids],
        }


def as_json(body: Any) -> str:  # Any: whatever JSON has
    """A reply, or part of one, as it is sent."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False)


def joined_logprobs(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Lists of the older shape, one after the other."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    return {key: [value for part in given for value in part[key]] for key in given[0]}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _failed(event: StepEvent) -> ApiError:
    """An answer that the engine gave up, as an error."""
    if event.finish_reason == "error" and event.error_kind == "request":
        return bad_request(event.error or "the engine refused the request", code="invalid_request")
    return internal()


def usage_of(choices: Sequence[Choice], plan: Plan) -> dict[str, Any]:
    """Tokens of a whole request; a prompt that is answered n times counts once."""
    prompt = sum(len(one.ids) for one in plan.prompts)
    output = 0 if plan.silent else sum(c.last.completion_tokens for c in choices if c.last is not None)
    cached = sum(c.last.cached_tokens for c in choices if c.last is not None and c.index % plan.n == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "drafts": {  # ours
            "rounds": sum(c.rounds for c in choices),
            "drafted": sum(c.drafted for c in choices),
            "verified": sum(c.verified for c in choices),
            "accepted": sum(c.accepted for c in choices),
        },
    }


class Shape:
    """Builds a request's replies."""

    def __init__(self, plan: Plan, model: ServedModel, created: int) -> None:
        self._plan, self._model, self._created = plan, model, created
        self._chat = isinstance(plan.body, ChatRequest)
        options = plan.body.stream_options
        self._usage = bool(options and options.include_usage)
        self._ids = bool(plan.body.return_token_ids)
        self._around: dict[int, tuple[str, str]] = {}  # a plain chunk before and behind its text, by choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._plan.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": f"dspark-{dspark.__version__}",
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The one reply of a request that does not stream."""
        body = self._head("chat.completion" if self._chat else "text_completion")
        body["choices"] = [self._whole_choice(choice) for choice in choices]
        body["usage"] = usage_of(choices, self._plan)
        if self._ids and self._chat:
            body["prompt_token_ids"] = list(self._plan.prompts[0].ids)
        return body

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        logprobs = choice.logprobs(choice.tokens)
        if self._chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            shaped: dict[str, Any] = {"index": choice.index, "message": message}
        else:
            if self._plan.echo:
                text = choice.echo_text(self._model) + text
                logprobs = joined_logprobs([choice.echo_logprobs(self._model), logprobs])
            shaped = {"index": choice.index, "text": text}
            if self._ids:
                shaped["prompt_token_ids"] = list(choice.prompt.ids)
        if self._ids:
            shaped["token_ids"] = list(choice.token_ids)
        return {**shaped, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before an answer's text: the role of a chat's, the echoed prompt of a completion's, else None."""
        if self._chat:
            shaped: dict[str, Any] = {"index": choice.index, "delta": {"role": "assistant", "content": ""}}
            extra = {"prompt_token_ids": list(choice.prompt.ids)} if self._ids and choice.index == 0 else {}
            return self._chunk({**shaped, "logprobs": None, "finish_reason": None}, extra)
        shaped = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}
        if self._ids:
            shaped |= {"prompt_token_ids": list(choice.prompt.ids), "token_ids": []}
        if self._plan.echo:
            shaped |= {"text": choice.echo_text(self._model), "logprobs": choice.echo_logprobs(self._model)}
        return self._chunk(shaped) if self._ids or self._plan.echo else None

    def chunk(self, choice: Choice, event: StepEvent, delta: Delta) -> dict[str, Any] | None:
        """The chunk of one event; None if it has nothing to say."""
        drafts = choice.drafts(event, delta)
        silent = not (delta.text or delta.tokens or delta.finish_reason or (self._ids and delta.token_ids))
        if silent and not (drafts and event.verify_len):
            return None
        logprobs = choice.logprobs(delta.tokens) if delta.tokens else None
        text: dict[str, Any] = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        if self._chat and not delta.text and delta.finish_reason:
            text = {"delta": {}}
        shaped = {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if self._ids:
            shaped["token_ids"] = list(delta.token_ids)
        return self._chunk(shaped, {"drafts": drafts} if drafts else {})

    def told(self, choice: Choice, event: StepEvent, delta: Delta) -> str | None:
        """:meth:`chunk` as JSON. One that differs from others in its text alone is not built anew: that would be half
        of what a token costs the server, at a time when the engine needs its cores."""
        if self._ids or not choice.plain or delta.finish_reason is not None:
            chunk = self.chunk(choice, event, delta)
            return None if chunk is None else as_json(chunk)
        if not delta.text:
            return None
        around = self._around.get(choice.index)
        if around is None:
            before, _, behind = as_json(self.chunk(choice, event, Delta(text=MARK))).rpartition(encode_basestring(MARK))
            around = self._around[choice.index] = before, behind
        return around[0] + encode_basestring(delta.text) + around[1]

    def last(self, choices: Sequence[Choice]) -> dict[str, Any] | None:
        """The chunk with the usage, if it is wanted."""
        if not self._usage:
            return None
        body = self._head("chat.completion.chunk" if self._chat else "text_completion")
        return {**body, "choices": [], "usage": usage_of(choices, self._plan)}

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> dict[str, Any]:
        body = self._head("chat.completion.chunk" if self._chat else "text_completion")
        usage: dict[str, Any] = {"usage": None} if self._usage else {}
        return {**body, "choices": [choice], **usage, **(extra or {})}
