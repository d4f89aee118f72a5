"""From a checked body to what the engine is asked: prompts as ids, sampling, limits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from dspark.chat import ChatFormat
from dspark.core import SamplingParams
from dspark.errors import ConfigError, DsparkError
from dspark.serve.api.config import ApiConfig, ServedModel
from dspark.serve.api.errors import ApiError, bad_request, shown
from dspark.serve.api.schemas import ChatRequest, CompletionRequest, Part
from dspark.serve.constraint import Constraint
from dspark.serve.request import GenerationRequest, seed_of_answer

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat's answer may fill the context
CHARS_PER_TOKEN = 32  # several times what any text has
TEMPLATE_WORDS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "conversation", "tokenize"})
MAX_TEMPLATE_OPTIONS = 16
MAX_OPTION_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a request."""

    ids: tuple[int, ...]
    text: str | None = None  # as it was given; None if it was given as ids or messages


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a body asks for; choice i continues prompt i // n."""

    body: CompletionRequest | ChatRequest
    id: str
    prompts: tuple[Prompt, ...]
    n: int
    choices: tuple[GenerationRequest, ...]
    echo: bool
    silent: bool  # no output is wanted: one token is generated, because the engine cannot do with none, and dropped
    skip_special_tokens: bool

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]


def choices_of(body: CompletionRequest | ChatRequest) -> int:
    """How many answers a body asks for."""
    return (body.n or 1) * (len(_listed(body.prompt)) if isinstance(body, CompletionRequest) else 1)


def check_sizes(body: CompletionRequest | ChatRequest, config: ApiConfig) -> None:
    """Refuse what is more than the server's settings allow, before any work. Raises :class:`ApiError`."""
    stops = body.stop if isinstance(body.stop, list) else [] if body.stop is None else [body.stop]
    counts = [
        ("n", body.n or 1, config.max_n),
        ("stop", len(stops), config.max_stop),
        ("stop_token_ids", len(body.stop_token_ids or ()), config.max_stop_token_ids),
        ("logit_bias", len(body.logit_bias or ()), config.max_logit_bias),
    ]
    if isinstance(body, ChatRequest):
        counts.append(("messages", len(body.messages), config.max_messages))
        for i, message in enumerate(body.messages):
            if isinstance(message.content, list):
                counts.append((f"messages.{i}.content", len(message.content), config.max_parts))
        counts.append(("top_logprobs", body.top_logprobs or 0, config.max_top_logprobs))
        if not body.messages:
            raise bad_request("messages is empty; give at least one", "messages")
    else:
        counts.append(("prompt", len(_listed(body.prompt)), config.max_prompts))
        counts.append(("logprobs", body.logprobs or 0, config.max_top_logprobs))
    for name, count, most in counts:
        if count > most:
            raise bad_request(f"{name} is or has {count}; this server takes at most {most}", name)
    if (answers := choices_of(body)) > config.max_choices:
        raise bad_request(f"{answers} answers are asked for; this server takes at most {config.max_choices}", "n")
    for i, text in enumerate(stops):
        if not 1 <= len(text) <= config.max_stop_chars:
            raise bad_request(f"stop.{i} has {len(text)} characters; give 1 to {config.max_stop_chars}", f"stop.{i}")
    _check_pairs(body)


def _check_pairs(body: CompletionRequest | ChatRequest) -> None:
    """Options that are of use only with another."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given without stream", "stream_options")
    if not isinstance(body, ChatRequest):
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs is given without logprobs", "top_logprobs")
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    kinds = body.response_format is not None and body.response_format.type != "text"
    if kinds and body.structured_outputs is not None:
        raise bad_request("structured_outputs and response_format are both given; choose one", "structured_outputs")


def make_plan(
    body: CompletionRequest | ChatRequest, model: ServedModel, config: ApiConfig, constraint: Constraint | None = None
) -> Plan:
    """Render, tokenise and check against the model. Slow for long prompts: not for the event loop.

    Raises :class:`ApiError` 400 for what the model cannot do.
    """
    try:
        prompts = _prompts(body, model)
        asked = _asked_tokens(body, config)
        silent = asked == 0
        if silent and not (isinstance(body, CompletionRequest) and body.echo):
            raise bad_request("max_tokens is 0; it must be 1 or more (0 is for echo)", "max_tokens")
        reply_id = ("chatcmpl-" if isinstance(body, ChatRequest) else "cmpl-") + secrets.token_hex(12)
        seed = body.seed if body.seed is not None else secrets.randbits(63)
        choices = [
            _choice(body, model, prompt, asked, f"{reply_id}-{i * (body.n or 1) + j}", seed, j, constraint)
            for i, prompt in enumerate(prompts)
            for j in range(body.n or 1)
        ]
    except DsparkError as error:
        raise bad_request(str(error), _param_of(error)) from None
    return Plan(
        body=body,
        id=reply_id,
        prompts=tuple(prompts),
        n=body.n or 1,
        choices=tuple(choices),
        echo=isinstance(body, CompletionRequest) and bool(body.echo),
        silent=silent,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _param_of(error: DsparkError) -> str | None:
    """The field that a message of ours begins with, if it does."""
    word = str(error).partition(" ")[0]
    return word if word in CompletionRequest.model_fields or word in ChatRequest.model_fields else None


def _prompts(body: CompletionRequest | ChatRequest, model: ServedModel) -> list[Prompt]:
    if isinstance(body, ChatRequest):
        chat = _chat_of(body, model.chat)
        messages = [{"role": _role(m.role), "content": _text(m.content)} for m in body.messages]
        _check_chars("messages", sum(len(message["content"]) for message in messages), model)
        prompts = [Prompt(ids=tuple(chat.prompt_ids(messages)))]
    else:
        prompts = [_prompt(item, model) for item in _listed(body.prompt)]
    for i, prompt in enumerate(prompts):
        name = "messages" if isinstance(body, ChatRequest) else "prompt" if len(prompts) == 1 else f"prompt.{i}"
        if not prompt.ids:
            raise bad_request(f"{name} is empty; give at least one token", name)
        if len(prompt.ids) >= model.max_len:
            raise _too_long(name, len(prompt.ids), 1, model.max_len)
    if not prompts:
        raise bad_request("prompt is empty; give at least one", "prompt")
    return prompts


def _too_long(name: str, prompt: int, output: int, most: int) -> ApiError:
    message = f"{name} has {prompt} tokens, and {output} more are asked for; this model's context holds {most}"
    return bad_request(message, name, code="context_length_exceeded")


def _check_chars(name: str, chars: int, model: ServedModel) -> None:
    """Refuse a text that cannot fit before it is tokenised, which would take hundreds of bytes per character."""
    if chars > CHARS_PER_TOKEN * model.max_len:
        message = (
            f"{name} has {chars} characters; this model's context holds {model.max_len} tokens, and this server reads "
            f"at most {CHARS_PER_TOKEN} characters for each"
        )
        raise bad_request(message, name, code="context_length_exceeded")


def _prompt(item: str | list[int], model: ServedModel) -> Prompt:
    if isinstance(item, str):
        _check_chars("prompt", len(item), model)
        return Prompt(ids=tuple(model.chat.tokenizer(item, add_special_tokens=True)["input_ids"]), text=item)
    if item and max(item) >= model.vocab_size:
        raise bad_request(f"prompt holds token {max(item)}; the vocabulary has {model.vocab_size}", "prompt")
    return Prompt(ids=tuple(item))


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Prompts as a list, whichever way they were given."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]  # a list of ints, by its first
    return prompt  # type: ignore[return-value]


def _role(role: str) -> str:
    """Templates know ``system``; ``developer`` is OpenAI's newer word for it."""
    return "system" if role == "developer" else role


def _text(content: str | list[Part]) -> str:
    """Parts are joined by newlines, as vLLM does for templates that want a text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _chat_of(body: ChatRequest, chat: ChatFormat) -> ChatFormat:
    """The format with the request's own template options. Raises :class:`ApiError` for one that the template lacks."""
    options = body.chat_template_kwargs
    if not options or {**chat.template_options, **options} == chat.template_options:
        return chat
    if len(options) > MAX_TEMPLATE_OPTIONS:
        raise bad_request(f"chat_template_kwargs has {len(options)} options", "chat_template_kwargs")
    for name, value in options.items():
        place = f"chat_template_kwargs.{name}"[:128]
        if name in TEMPLATE_WORDS or not name.isidentifier() or len(name) > MAX_OPTION_CHARS:
            raise bad_request(f"{shown(name)} is not an option that a request may set", place)
        if isinstance(value, str) and len(value) > MAX_OPTION_CHARS:
            raise bad_request(f"{place} has {len(value)} characters; at most {MAX_OPTION_CHARS} are taken", place)
    try:
        merged = {**chat.template_options, **options}
        return ChatFormat(chat.tokenizer, eos_token_ids=chat.stop_token_ids, template_options=merged)
    except DsparkError as error:
        raise bad_request(str(error), "chat_template_kwargs") from None


def _given_tokens(body: CompletionRequest | ChatRequest) -> tuple[str, int | None]:
    """Most tokens of an answer as the client says, and by which name it does."""
    if isinstance(body, ChatRequest) and body.max_tokens is None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _asked_tokens(body: CompletionRequest | ChatRequest, config: ApiConfig) -> int | None:
    """Most tokens of an answer; None: what the context leaves."""
    name, given = _given_tokens(body)
    most = config.max_completion_tokens
    if given is not None and most is not None and given > most:
        raise bad_request(f"{name} is {given}; this server gives at most {most}", name)
    if given is None and isinstance(body, CompletionRequest):
        return DEFAULT_COMPLETION_TOKENS if most is None else min(most, DEFAULT_COMPLETION_TOKENS)
    return given if given is not None else most


def _logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Alternatives per token; the two endpoints ask for them in two ways."""
    if isinstance(body, ChatRequest):
        return body.top_logprobs or 0 if body.logprobs else None
    return body.logprobs


def _choice(
    body: CompletionRequest | ChatRequest,
    model: ServedModel,
    prompt: Prompt,
    asked: int | None,
    request_id: str,
    seed: int,
    number: int,
    constraint: Constraint | None,
) -> GenerationRequest:
    """What the engine is asked for one answer, the ``number``-th to its prompt."""
    room = model.max_len - len(prompt.ids)
    explicit = _given_tokens(body)[1]
    if explicit is not None and explicit > room:
        name = "messages" if isinstance(body, ChatRequest) else "prompt"
        raise _too_long(name, len(prompt.ids), explicit, model.max_len)
    new = room if asked is None else max(1, min(asked, room))
    if (body.min_tokens or 0) > new:
        raise bad_request(f"min_tokens is {body.min_tokens}; the answer has at most {new}", "min_tokens")
    logprobs = _logprobs(body)
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    stops = tuple(body.stop) if isinstance(body.stop, list) else () if body.stop is None else (body.stop,)
    own = () if body.ignore_eos else model.chat.stop_token_ids
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt.ids,
        sampling=_sampling(body, model, seed_of_answer(seed, number)),
        max_new_tokens=new,
        stop_token_ids=tuple(sorted({*own, *_known_ids(body.stop_token_ids or [], model)})),
        stop=stops,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        constraint=constraint,
        salt=body.cache_salt or "",
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _known_ids(ids: list[int], model: ServedModel) -> list[int]:
    if ids and max(ids) >= model.vocab_size:
        raise bad_request(
            f"stop_token_ids holds {max(ids)}; the vocabulary has {model.vocab_size} tokens", "stop_token_ids"
        )
    return ids


def _sampling(body: CompletionRequest | ChatRequest, model: ServedModel, seed: int) -> SamplingParams:
    """OpenAI's defaults: temperature 1, no filter."""
    top_k = body.top_k or 0
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, top_k) if top_k < model.vocab_size else 0,
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            min_tokens=body.min_tokens or 0,
            logit_bias=_bias(body.logit_bias or {}, model.vocab_size),
            seed=seed,
        )
    except ConfigError as error:
        raise bad_request(str(error), _param_of(error)) from None


def _bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's keys are token ids written as strings."""
    found: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            place = f"logit_bias.{key}"[:128]
            raise bad_request(f"logit_bias has the key {shown(key)}; keys are token ids, 0 to {vocab_size - 1}", place)
        if int(key) in found:
            raise bad_request(f"logit_bias names token {int(key)} twice", f"logit_bias.{key}"[:128])
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))
