# ruff: noqa: RUF001 - DeepSeek's special tokens are written with a wide bar
"""The one chat path on the templates of well-known families: assistant tokens exactly, headers as decoding has them."""

from __future__ import annotations

import pytest
from chat_templates import DEEPSEEK_R1, FAMILIES, Family, byte_tokenizer

from dspark.chat import ChatFormat, EncodedConversation
from dspark.errors import ConfigError, DataError, ModelError

USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "It scatters."}
THANKS = {"role": "user", "content": "Und im All? é🙂"}
BLACK = {"role": "assistant", "content": "Black."}
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
KEEPING = sorted(set(FAMILIES) - {"qwen3"})  # families whose past answers stay as they were


def chat_of(name: str, **options: object) -> ChatFormat:
    return ChatFormat(byte_tokenizer(FAMILIES[name]), template_options=options)


def text_of(chat: ChatFormat, ids: object) -> str:
    return chat.decode(list(ids), skip_special_tokens=False)


def supervised(chat: ChatFormat, encoded: EncodedConversation) -> str:
    return text_of(chat, [i for i, kept in zip(encoded.token_ids, encoded.loss_mask, strict=True) if kept])


def spoken(family: Family, answer: dict) -> str:
    """An answer as the template writes it, end token included."""
    return (" " if family is FAMILIES["mistral"] else "") + answer["content"] + family.end


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_ends_where_an_answer_begins(name: str) -> None:
    chat, family = chat_of(name), FAMILIES[name]
    assert text_of(chat, chat.prompt_ids([USER])) == family.user_header + USER["content"] + family.answer_header


@pytest.mark.parametrize("name", KEEPING)
def test_all_answers_and_their_end_tokens_are_supervised(name: str) -> None:
    chat, family = chat_of(name), FAMILIES[name]
    messages = [USER, ANSWER, THANKS, BLACK]
    encoded = chat.conversation_ids(messages)
    assert supervised(chat, encoded) == spoken(family, ANSWER) + spoken(family, BLACK)
    assert chat.training_conversations(messages) == [encoded]
    for count in (1, 3):  # decoding continues the same ids
        prompt = tuple(chat.prompt_ids(messages[:count]))
        assert encoded.token_ids[: len(prompt)] == prompt
        assert encoded.loss_mask[len(prompt)] and not encoded.loss_mask[len(prompt) - 1]
    (end,) = chat.tokenizer(family.end, add_special_tokens=False)["input_ids"]
    assert encoded.token_ids[-1] == end and end in chat.stop_token_ids and chat.end_token_id == end
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text_of(chat, encoded.token_ids) == whole.removesuffix(family.after)


@pytest.mark.parametrize("name", KEEPING)
def test_drawn_ids_give_the_same_example_as_the_conversation(name: str) -> None:
    chat, family = chat_of(name), FAMILIES[name]
    drawn = chat.tokenizer(spoken(family, ANSWER), add_special_tokens=False)["input_ids"]
    assert chat.training_example([USER], drawn) == chat.conversation_ids([USER, ANSWER])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_users_turn_begins_after_its_header_and_ends_with_a_token(name: str) -> None:
    chat, family = chat_of(name), FAMILIES[name]
    turn = chat.user_turn()
    assert text_of(chat, turn.prefix_ids) == family.user_header
    after = chat.prompt_ids([USER])[len(turn.prefix_ids) + len(USER["content"])]
    assert after in turn.end_token_ids and set(chat.stop_token_ids) <= set(turn.end_token_ids)


# --- thinking --------------------------------------------------------------------------------------------------------


def test_qwen3_thinks_only_where_asked_to() -> None:
    thinking, quick = chat_of("qwen3"), chat_of("qwen3", enable_thinking=False)
    assert text_of(quick, quick.prompt_ids([USER])).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert text_of(thinking, thinking.prompt_ids([USER])).endswith("<|im_start|>assistant\n")
    assert supervised(quick, quick.conversation_ids([USER, ANSWER])) == "It scatters.<|im_end|>"
    thought = {"role": "assistant", "content": THOUGHT + "It scatters."}
    assert supervised(thinking, thinking.conversation_ids([USER, thought])) == THOUGHT + "It scatters.<|im_end|>"
    with pytest.raises(DataError, match="differently inside the whole"):
        quick.conversation_ids([USER, thought])


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}])
def test_qwen3_drops_past_thoughts_so_every_answer_is_a_conversation(options: dict) -> None:
    chat = chat_of("qwen3", **options)
    first, second = ({"role": "assistant", "content": THOUGHT + text["content"]} for text in (ANSWER, BLACK))
    messages = [USER, first, THANKS, second]
    with pytest.raises(DataError, match="each answer as a conversation of its own"):
        chat.conversation_ids(messages)
    one, two = chat.training_conversations(messages)
    assert supervised(chat, one) == THOUGHT + "It scatters.<|im_end|>"
    assert supervised(chat, two) == THOUGHT + "Black.<|im_end|>"
    for encoded, before in ((one, [USER]), (two, [USER, first, THANKS])):
        prompt = tuple(chat.prompt_ids(before))
        assert encoded.token_ids[: len(prompt)] == prompt and not any(encoded.loss_mask[: len(prompt)])
        assert all(encoded.loss_mask[len(prompt) :])
    assert "Let me see" not in text_of(chat, two.token_ids[: len(chat.prompt_ids([USER, first, THANKS]))])


def test_deepseek_r1_opens_the_thought_itself() -> None:
    """Its past answers have no thoughts and its prompts begin one: only drawn ids can be trained on."""
    chat = ChatFormat(byte_tokenizer(FAMILIES["deepseek"], template=DEEPSEEK_R1))
    assert text_of(chat, chat.prompt_ids([USER])).endswith("<｜Assistant｜><think>\n")
    with pytest.raises(DataError, match="differently inside the whole"):
        chat.training_conversations([USER, ANSWER])
    drawn = chat.tokenizer("Hm.\n</think>\n\nIt scatters.<｜end▁of▁sentence｜>", add_special_tokens=False)["input_ids"]
    encoded = chat.training_example([USER], drawn)
    assert supervised(chat, encoded).startswith("Hm.\n</think>") and encoded.token_ids[-1] in chat.stop_token_ids
    history = [USER, {"role": "assistant", "content": "Hm.\n</think>\n\nIt scatters."}, THANKS]
    assert "Hm." not in text_of(chat, chat.prompt_ids(history))


def test_an_option_that_no_template_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="template_options has 'enable_thinking'"):
        chat_of("llama3", enable_thinking=False)
    with pytest.raises(ConfigError, match="'thinking'"):
        chat_of("qwen3", thinking=False)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_templates_that_know_no_system_say_so(name: str) -> None:
    with pytest.raises(DataError, match="chat template refuses"):
        chat_of(name).prompt_ids([{"role": "system", "content": "Be kind."}, USER])


def test_conversations_without_an_answer_teach_nothing() -> None:
    with pytest.raises(DataError, match="no assistant message"):
        chat_of("llama3").training_conversations([USER])


def test_without_a_template_nobody_knows_where_a_user_speaks() -> None:
    tokenizer = byte_tokenizer(FAMILIES["llama3"])
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        ChatFormat(tokenizer).user_turn()


def test_a_fingerprint_tells_template_options_and_vocabulary_apart() -> None:
    same = [chat_of("qwen3").fingerprint() for _ in range(2)]
    others = [chat_of(name).fingerprint() for name in FAMILIES]
    others += [chat_of("qwen3", enable_thinking=False).fingerprint()]
    assert len(set(same)) == 1 and len(set(others)) == len(others)
