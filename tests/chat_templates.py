# ruff: noqa: RUF001 - DeepSeek's special tokens are written with a wide bar
"""Chat templates of well-known families, cut down to what they do to plain conversations, and a byte tokenizer each.

Written from what the families' templates are known to do, in our own words: headers, end tokens, default system
prompts, dropped thoughts, what a generation prompt adds, and what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_LAST_USER = (
    "{%- set found = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set found.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
QWEN3 = (
    _LAST_USER + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set thought = '' %}{%- set content = m.content %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > found.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
GEMMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('No system role') }}{%- endif %}"
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate') }}{%- endif %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (  # reads no add_generation_prompt: an answer begins where the instruction ends
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"
)
SMOLLM2 = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_DEEPSEEK = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}"
    "{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
    "{%- else %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}"
)
DEEPSEEK = _DEEPSEEK + "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"
DEEPSEEK_R1 = _DEEPSEEK + "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}"
MARKED = (  # with the markers that transformers makes its assistant masks from
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
UNASKED = (  # has a header for answers, and leaves it out of every prompt
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
)

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template with the tokens it lives on, and what its headers look like."""

    template: str
    special: tuple[str, ...]
    end: str  # of an answer
    bos: str | None = None
    eos: str
    user_header: str  # all that stands before a first user's text
    answer_header: str  # between a user's text and an answer
    after: str = ""  # what stands behind an answer's end


FAMILIES = {
    "qwen3": Family(
        template=QWEN3,
        special=_CHATML,
        end="<|im_end|>",
        eos="<|im_end|>",
        user_header="<|im_start|>user\n",
        answer_header="<|im_end|>\n<|im_start|>assistant\n",
        after="\n",
    ),
    "gemma": Family(
        template=GEMMA,
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        end="<end_of_turn>",
        bos="<bos>",
        eos="<eos>",
        user_header="<bos><start_of_turn>user\n",
        answer_header="<end_of_turn>\n<start_of_turn>model\n",
        after="\n",
    ),
    "llama3": Family(
        template=LLAMA3,
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
        bos="<|begin_of_text|>",
        eos="<|end_of_text|>",
        user_header="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
        answer_header="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": Family(
        template=MISTRAL,
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        end="</s>",
        bos="<s>",
        eos="</s>",
        user_header="<s>[INST] ",
        answer_header="[/INST]",
    ),
    "smollm2": Family(
        template=SMOLLM2,
        special=_CHATML,
        end="<|im_end|>",
        eos="<|im_end|>",
        user_header="<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n<|im_start|>user\n",
        answer_header="<|im_end|>\n<|im_start|>assistant\n",
        after="\n",
    ),
    "deepseek": Family(
        template=DEEPSEEK,
        special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        end="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        user_header="<｜begin▁of▁sentence｜><｜User｜>",
        answer_header="<｜Assistant｜>",
    ),
    "marked": Family(
        template=MARKED,
        special=_CHATML,
        end="<|im_end|>",
        eos="<|endoftext|>",
        user_header="<|im_start|>user\n",
        answer_header="<|im_end|>\n<|im_start|>assistant\n",
        after="\n",
    ),
    "unasked": Family(
        template=UNASKED,
        special=_CHATML,
        end="<|im_end|>",
        eos="<|endoftext|>",
        user_header="<|im_start|>user\n",
        answer_header="<|im_end|>\n<|im_start|>assistant\n",
        after="\n",
    ),
}


def byte_tokenizer(family: Family, *, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes and the family's special tokens, with its template (or another)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*family.special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        additional_special_tokens=list(family.special),
    )
    fast.chat_template = template or family.template
    return fast
