"""One road from messages to ids: what is supervised, where answers stop, and how text streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import VOCAB_SIZE, tiny_vocabulary
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.chat import ChatFormat, EncodedConversation, TextStream, read_eos_token_ids
from dspark.errors import DataError, ModelError
from dspark.models.gguf_tokenizer import build_tokenizer

USER = {"role": "user", "content": "hello the"}
ANSWER = {"role": "assistant", "content": "world"}
THANKS = {"role": "user", "content": "12"}
IM_START, IM_END = 1, 2
# drops what a past answer thought, and shows it in the last one
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if fast %}{{ '<think>' }}{% endif %}{% endif %}"
)


def make_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    vocabulary = tiny_vocabulary(**changes)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(vocabulary),
        **{f"{name}_token": vocabulary.tokens[i] for name, i in vocabulary.special_ids.items()},
    )
    tokenizer.chat_template = vocabulary.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(make_tokenizer())


@pytest.fixture(scope="module")
def plain() -> ChatFormat:
    return ChatFormat(make_tokenizer(chat_template=None, add_bos=True))


def supervised(chat: ChatFormat, encoded: EncodedConversation) -> str:
    ids = [i for i, kept in zip(encoded.token_ids, encoded.loss_mask, strict=True) if kept]
    return chat.decode(ids, skip_special_tokens=False)


def test_prompt_ends_where_the_answer_begins(chat: ChatFormat) -> None:
    text = chat.decode(chat.prompt_ids([USER]), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello the<|im_end|>\n<|im_start|>assistant\n"


def test_answers_and_their_end_tokens_are_supervised(chat: ChatFormat) -> None:
    encoded = chat.conversation_ids([USER, ANSWER, THANKS, ANSWER])
    assert supervised(chat, encoded) == "world<|im_end|>world<|im_end|>"
    assert chat.decode(encoded.token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello the<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"
        "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>"
    )
    assert len(encoded.token_ids) == len(encoded.loss_mask) and encoded.loss_mask[-1]


def test_conversation_without_an_answer_is_not_supervised(chat: ChatFormat) -> None:
    encoded = chat.conversation_ids([USER])
    assert not any(encoded.loss_mask) and encoded.token_ids[-2] == IM_END  # and the newline stays


def test_training_example_is_prompt_and_exact_ids(chat: ChatFormat) -> None:
    # ids that no tokenizer would choose: "hello" in single letters
    letters = [chat.tokenizer.convert_tokens_to_ids(c) for c in "hello"]
    encoded = chat.training_example([USER], [*letters, IM_END])
    prompt = chat.prompt_ids([USER])
    assert encoded.token_ids == (*prompt, *letters, IM_END)
    assert encoded.loss_mask == (False,) * len(prompt) + (True,) * 6


def test_both_roads_to_a_training_example_meet(chat: ChatFormat, plain: ChatFormat) -> None:
    for form in (chat, plain):
        answer = form.tokenizer(ANSWER["content"], add_special_tokens=False)["input_ids"]
        assert form.conversation_ids([USER, ANSWER]) == form.training_example([USER], [*answer, IM_END])


def test_nothing_after_a_stop_token_is_supervised(chat: ChatFormat) -> None:
    sly = {"role": "assistant", "content": "the<|im_end|>hello"}
    encoded = chat.conversation_ids([USER, sly])
    assert supervised(chat, encoded) == "the<|im_end|>" and encoded.token_ids[-1] == IM_END


def test_turn_rendered_differently_in_the_past_is_refused() -> None:
    chat = ChatFormat(make_tokenizer(chat_template=THINKING_TEMPLATE))
    assert supervised(chat, chat.conversation_ids([USER, ANSWER])) == "<think>world<|im_end|>"
    with pytest.raises(DataError, match="differently inside the whole conversation"):
        chat.conversation_ids([USER, ANSWER, THANKS, ANSWER])


def test_template_options_reach_every_rendering() -> None:
    chat = ChatFormat(make_tokenizer(chat_template=THINKING_TEMPLATE), template_options={"fast": True})
    assert chat.prompt_ids([USER])[-1] == 3  # <think>
    assert supervised(chat, chat.conversation_ids([USER, ANSWER])) == "world<|im_end|>"


def test_token_across_a_border_is_refused() -> None:
    # nothing parts the header "h" from the answer "e...", and "he" is one token
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'h' }}{% endif %}{{ m['content'] + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'h' }}{% endif %}"
    )
    chat = ChatFormat(make_tokenizer(chat_template=template))
    assert supervised(chat, chat.conversation_ids([USER, ANSWER])) == "world<|im_end|>"
    with pytest.raises(DataError, match="a token reaches across the border"):
        chat.conversation_ids([USER, {"role": "assistant", "content": "ello"}])


# --- stop tokens -----------------------------------------------------------------------------------------------------


def test_stop_tokens_come_from_config_tokenizer_and_template() -> None:
    tokenizer = make_tokenizer()
    assert ChatFormat(tokenizer).stop_token_ids == (IM_END,)
    assert ChatFormat(tokenizer, eos_token_ids=[0]).stop_token_ids == (0, IM_END)
    ended_otherwise = make_tokenizer(special_ids={"eos": 0})  # the turn end is special but nobody's eos
    assert ChatFormat(ended_otherwise).stop_token_ids == (0, IM_END)
    assert ChatFormat(make_tokenizer(special_ids={"eos": 0}, chat_template=None)).stop_token_ids == (0,)
    assert ChatFormat(make_tokenizer(special_ids={}, chat_template=None)).stop_token_ids == ()


def test_turn_without_an_end_token_is_supervised_whole() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    chat = ChatFormat(make_tokenizer(chat_template=template, special_ids={}))
    assert chat.stop_token_ids == ()
    assert supervised(chat, chat.conversation_ids([USER, {"role": "assistant", "content": "12"}])) == "12\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 0]}, (7, 0)), ({"eos_token_id": None}, ()), ({}, ())],
)
def test_eos_of_the_generation_config(content: dict, expected: tuple, tmp_path: Path) -> None:
    assert read_eos_token_ids(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [null]}'])
def test_broken_generation_config(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match="generation_config"):
        read_eos_token_ids(tmp_path)


def test_from_folder(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    chat = ChatFormat.from_folder(tmp_path)
    assert chat.stop_token_ids == (0, 2)
    assert chat.prompt_ids([USER]) == ChatFormat(make_tokenizer()).prompt_ids([USER])


# --- plain text ------------------------------------------------------------------------------------------------------


def test_plain_prompt_is_its_text_after_bos(plain: ChatFormat) -> None:
    ids = plain.prompt_ids([USER])
    assert ids[0] == IM_START and plain.decode(ids) == "hello the"
    assert plain.decode(plain.prompt_ids([{"role": "system", "content": "the"}, USER])) == "the\n\nhello the"


def test_plain_conversation_is_a_prompt_and_one_answer(plain: ChatFormat) -> None:
    encoded = plain.conversation_ids([THANKS, USER, ANSWER])
    assert supervised(plain, encoded) == "world<|im_end|>"
    for messages in ([USER], [ANSWER], [USER, ANSWER, USER], [USER, ANSWER, USER, ANSWER]):
        with pytest.raises(DataError, match="no chat template"):
            plain.conversation_ids(messages)


# --- malformed input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"role": "user"}], 'message 0 has no text under "content"'),
        ([USER, {"content": "x"}], 'message 1 has no text under "role"'),
        ([{"role": "user", "content": None}], "message 0"),
    ],
)
def test_malformed_messages(messages: list, message: str, chat: ChatFormat, plain: ChatFormat) -> None:
    for form in (chat, plain):
        for encode in (form.prompt_ids, form.conversation_ids):
            with pytest.raises(DataError, match=message):
                encode(messages)


def test_conversation_that_begins_with_an_answer(chat: ChatFormat) -> None:
    with pytest.raises(DataError, match="begins with an assistant"):
        chat.conversation_ids([ANSWER, USER])


def test_template_that_refuses() -> None:
    template = "{% if messages|length > 2 %}{{ raise_exception('only two') }}{% endif %}{{ messages[0]['content'] }}"
    chat = ChatFormat(make_tokenizer(chat_template=template))
    with pytest.raises(DataError, match="refuses the conversation: only two"):
        chat.prompt_ids([USER, ANSWER, USER])
    with pytest.raises(ModelError, match="chat template is unusable"):
        ChatFormat(make_tokenizer(chat_template="{{ messages[9]['content'] + nothing }}"))


def test_mask_and_ids_have_one_length() -> None:
    with pytest.raises(DataError, match="2 token ids but 1"):
        EncodedConversation(token_ids=(1, 2), loss_mask=(True,))


# --- streaming -------------------------------------------------------------------------------------------------------


def test_characters_are_held_back_until_whole(chat: ChatFormat) -> None:
    ids = chat.tokenizer("é🙂x", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7  # the tiny vocabulary has bytes only
    stream = chat.stream()
    assert [stream.push(i) for i in ids] == ["", "é", "", "", "", "🙂", "x"]
    assert stream.flush() == ""
    assert stream.push(*ids[:4]) == ""  # é is complete, the smile is not: both wait
    assert stream.flush() == "é\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_silent_unless_asked_for(chat: ChatFormat) -> None:
    ids = chat.tokenizer("the<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [chat.stream().push(*ids), chat.stream(skip_special_tokens=False).push(*ids)] == ["the", "the<|im_end|>"]


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30), size=st.integers(1, 3), skip=st.booleans())
def test_pieces_join_to_the_whole(chat: ChatFormat, ids: list[int], size: int, skip: bool) -> None:
    stream = chat.stream(skip_special_tokens=skip)
    pieces = [stream.push(*ids[i : i + size]) for i in range(0, len(ids), size)]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + stream.flush() == chat.decode(ids, skip_special_tokens=skip)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=20))
def test_pieces_join_for_a_decoder_that_looks_at_neighbours(text: str) -> None:
    # SentencePiece style: a leading space is dropped, and characters unknown to it are runs of byte tokens
    tokens = [f"<0x{i:02X}>" for i in range(256)] + ["▁", "▁a", "b"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    chat = ChatFormat(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    ids = [257, 258, 257, *text.encode(), 257, 258]
    stream = TextStream(chat)
    assert "".join(stream.push(i) for i in ids) + stream.flush() == chat.decode(ids) == f"ab a{text} ab"
