"""The requests' fields and their types, and the names of what we do not have.

A field is taken, or refused by its name; none is ignored. ``null`` means that a field is not given, as in OpenAI's
interface. Values that would change nothing are taken for options that we refuse otherwise (``store: false``, ``tools:
null``), because clients send them unasked. Sizes that depend on the server's settings are checked in
:mod:`dspark.serve.api.requests`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspark.serve.api.errors import ApiError, bad_request, shown, unsupported

Finite = Annotated[float, Field(allow_inf_nan=False)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
Count = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

# what we know and do not have: name -> why, or what to do instead
NOT_HERE: dict[str, str] = {
    "audio": "this server answers with text",
    "best_of": "ask for n answers and choose among them",
    "functions": "this server calls no tools",
    "function_call": "this server calls no tools",
    "guided_json": "use response_format or structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "include_stop_str_in_output": "the text ends before a stop string",
    "logits_processors": "this server runs no code of its clients",
    "messages": "it belongs to /v1/chat/completions",
    "metadata": "this server stores nothing",
    "modalities": "this server answers with text",
    "moderation": "this server moderates nothing",
    "parallel_tool_calls": "this server calls no tools",
    "prediction": "the drafter predicts by itself",
    "prompt": "it belongs to /v1/completions",
    "prompt_cache_key": "prefixes are shared by their text; cache_salt keeps them apart",
    "prompt_cache_options": "prefixes are shared by their text; cache_salt keeps them apart",
    "prompt_cache_retention": "prefixes are kept while there is room",
    "prompt_logprobs": "use echo with logprobs in /v1/completions",
    "reasoning_effort": "use chat_template_kwargs, if the model's template has such an option",
    "safety_identifier": "use user",
    "service_tier": "there is one tier",
    "store": "this server stores nothing",
    "suffix": "this server does not fill in the middle",
    "tool_choice": "this server calls no tools",
    "tools": "this server calls no tools",
    "use_beam_search": "the output is drawn from the model's distribution",
    "verbosity": "ask for it in a message",
    "web_search_options": "this server searches nothing",
}
NO_EFFECT: dict[str, tuple[Any, ...]] = {  # values of refused options that change nothing
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none",),
    "use_beam_search": (False,),
}


class Strict(BaseModel):
    """No unknown field, no conversion between types, and nothing changed afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None  # a last chunk with the usage of the whole request
    include_drafts: bool | None = None  # ours: which pieces of the text were drafts, for the page


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the output follows the schema in any case


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuredOutputs(Strict):
    """As vLLM names them; exactly one."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None  # Lark


class Sampled(Strict):
    """What both ways of asking have in common."""

    endpoint: ClassVar[str] = ""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None  # 0 and -1: off
    min_p: Annotated[Finite, Field(ge=0.0, lt=1.0)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100.0, le=100.0)]] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None  # as vLLM names it
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None  # prefixes are shared within it
    user: Annotated[str, Field(max_length=512)] | None = None  # only its hash is kept, in the log


class CompletionRequest(Sampled):
    """Body of /v1/completions."""

    endpoint: ClassVar[str] = "completions"

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Count | None = None


class Part(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message. Fields that assistants' messages come back with are taken as long as they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]


class ChatRequest(Sampled):
    """Body of /v1/chat/completions."""

    endpoint: ClassVar[str] = "chat"

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    chat_template_kwargs: dict[str, bool | int | str] | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest)
MESSAGE_EXTRAS = ("refusal", "annotations", "audio", "function_call", "tool_calls", "name", "tool_call_id", "reasoning")
PARTS_NOT_HERE = ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "input_image", "input_text")


def read_body(kind: type[Body], data: dict[str, Any]) -> Body:
    """Check an object's fields. Raises :class:`ApiError` 400 that names the first field that is wrong."""
    data = _without_refused(kind, data)
    if kind is ChatRequest:
        data = {**data, "messages": _plain_messages(data.get("messages"))}
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _named(error, data) from None


def _without_refused(kind: type[Body], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given and are ours to judge."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in kind.model_fields:
            if value is not None or kind.model_fields[name].is_required():
                kept[name] = value
        elif name not in NOT_HERE:
            raise ApiError(400, f"unknown option {shown(name)}", param=name[:64], code="unknown_parameter")
        elif value is not None and not any(_same(value, idle) for idle in NO_EFFECT.get(name, ())):
            raise unsupported(name, NOT_HERE[name])
    return kept


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b  # True is no 1


def _plain_messages(messages: Any) -> Any:
    """Messages without the empty fields that clients send back; a filled one, or a foreign part, is refused by name."""
    if not isinstance(messages, list):
        return messages
    return [_plain_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _plain_message(message: Any, place: str) -> Any:
    if not isinstance(message, dict):
        return message
    if (role := message.get("role")) in ("tool", "function"):
        why = f"a message of role {role} answers a tool call, and this server calls no tools"
        raise unsupported(f"{place}.role", why)
    for name in MESSAGE_EXTRAS:
        if message.get(name) not in (None, [], ""):
            raise unsupported(f"{place}.{name}", "messages here are a role and a text")
    if isinstance(parts := message.get("content"), list):
        for j, part in enumerate(parts):
            if isinstance(part, dict) and part.get("type") in PARTS_NOT_HERE:
                raise unsupported(f"{place}.content.{j}.type", f"{part['type']} parts; the model reads text alone")
    return {key: value for key, value in message.items() if key not in MESSAGE_EXTRAS}


def _named(error: ValidationError, data: dict[str, Any]) -> ApiError:
    """The first fault, by its place; of a union's branches the one that came closest."""
    places = [(_place(fault["loc"], data), fault) for fault in error.errors(include_url=False, include_context=False)]
    place, fault = max(places[:64], key=lambda pair: len(pair[0]))
    param = ".".join(place)[:128]
    if fault["type"] == "missing":
        return bad_request(f"{param} is missing", param, code="missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"unknown option {shown(param)}", param=param, code="unknown_parameter")
    if fault["loc"][0] == "prompt":
        return bad_request("prompt must be a text, a list of texts, a list of token ids, or a list of those", "prompt")
    code = "invalid_type" if "type" in fault["type"] else "invalid_value"
    return bad_request(f"{param} is {shown(fault['input'])}: {fault['msg'][:200]}", param, code=code)


def _place(path: tuple[int | str, ...], data: Any) -> list[str]:
    """A fault's path through the data, without pydantic's names of a union's branches, which stand in between."""
    place: list[str] = []
    for i, part in enumerate(path):
        named = isinstance(data, dict) and part in data
        if named or (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            data = data[part]
        elif not (isinstance(data, dict) and i == len(path) - 1):
            continue
        place.append(str(part))
    return place
