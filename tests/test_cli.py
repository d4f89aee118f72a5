"""The command line: what verbs print, and that every mistake of the user's ends in one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_chat import save_chat_model, save_random_drafter
from typer.testing import CliRunner, Result

import dspark.bundle
from dspark.cli import app
from dspark.core import SamplingParams

FAST = ("--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_random_drafter(tmp_path_factory.mktemp("drafter") / "random"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def run_ok(*arguments: str, stdin: str | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def complaint(*arguments: str, stdin: str | bytes | None = None) -> str:
    """The one line that a wrong command leaves on stderr."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, (result.exit_code, result.output)
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("dspark: "), result.stderr
    return result.stderr


def generated(model: str, *arguments: str) -> dict:
    command = ("generate", "tell me", "--model", model, "--json", "--max-new-tokens", "24", *FAST, *arguments)
    return json.loads(run_ok(*command))


# --- generate --------------------------------------------------------------------------------------------------------


def test_drafted_answers_are_the_undrafted_answer(model: str, drafter: str) -> None:
    plain = generated(model, "--drafter", "none")
    assert plain["finish_reason"] == "length" and len(plain["token_ids"]) == 24
    assert plain["acceptance_length"] == 1.0 and plain["prefix_acceptance"] == []
    for spec in ("ngram", drafter):
        drafted = generated(model, "--drafter", spec)
        assert (drafted["token_ids"], drafted["text"]) == (plain["token_ids"], plain["text"])


def test_fields_without_a_flag_of_their_own_are_set_by_name(model: str, drafter: str) -> None:
    rules = ("--set", "repetition_penalty=1.3", "--set", "rule=block", "--set", "banned_token_ids=[5]")
    plain = generated(model, "--drafter", "none", *rules)
    drafted = generated(model, "--drafter", drafter, *rules)
    assert plain["token_ids"] == drafted["token_ids"] and 5 not in plain["token_ids"]
    assert drafted["sampling"]["rule"] == "block" and drafted["sampling"]["repetition_penalty"] == 1.3


def test_json_says_what_the_run_was(model: str, drafter: str) -> None:
    data = generated(model, "--drafter", drafter, "--temperature", "0.9", "--seed", "7")
    assert data["model"] == model and data["drafter"] == "random with lookup" and data["dtype"] == "float32"
    assert data["sampling"] == asdict(SamplingParams(temperature=0.9, seed=7)) | {
        "banned_token_ids": [],
        "logit_bias": [],
    }
    assert len(data["prefix_acceptance"]) == len(data["conditional_acceptance"]) == 4
    assert set(data["milliseconds"]["per_round"]) == {"draft", "sequential", "verify", "host", "round"}
    assert data["milliseconds"]["per_round"]["verify"] > 0 and data["milliseconds"]["prefill"] > 0
    assert data["rounds"] >= 1 and data["tokens_per_second"] > 0


def test_a_seed_gives_its_text_again_and_another_seed_another(model: str) -> None:
    first, again, other = (
        generated(model, "--drafter", "none", "--temperature", "1", "--seed", seed)["token_ids"] for seed in "112"
    )
    assert first == again != other


def test_streamed_text_is_the_text_of_the_json(model: str) -> None:
    result = run("generate", "tell me", "--model", model, "--drafter", "ngram", "--max-new-tokens", "24", *FAST)
    assert result.exit_code == 0
    assert result.stdout == generated(model, "--drafter", "ngram")["text"] + "\n"
    assert "24 tokens (length)" in result.stderr


def test_prompt_from_stdin_and_raw_prompt(model: str) -> None:
    options = ("--model", model, "--drafter", "none", "--json", "--max-new-tokens", "4", *FAST)
    piped = json.loads(run_ok("generate", "-", *options, stdin="tell me"))
    assert piped["token_ids"] == json.loads(run_ok("generate", "tell me", *options))["token_ids"]
    raw = json.loads(run_ok("generate", "tell me", "--raw", *options))
    assert raw["prompt_tokens"] == len("tell me") < piped["prompt_tokens"]
    longer = json.loads(run_ok("generate", "tell me", "--system", "Be brief.", *options))
    assert longer["prompt_tokens"] > piped["prompt_tokens"] + len("Be brief.")


def test_schedulers_change_the_rounds_and_not_the_text(model: str, drafter: str) -> None:
    plain = generated(model, "--drafter", drafter)
    none_checked = generated(model, "--drafter", drafter, "--verify-len", "0")
    assert none_checked["rounds"] == 23 and none_checked["token_ids"] == plain["token_ids"]
    for options in (("threshold", "--threshold", "0.5"), ("greedy",), ("skip",)):
        assert generated(model, "--drafter", drafter, "--scheduler", *options)["token_ids"] == plain["token_ids"]


def test_threads_are_set(model: str) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        generated(model, "--drafter", "none", "--threads", "2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- chat ------------------------------------------------------------------------------------------------------------


def chatted(model: str, stdin: str, *arguments: str) -> str:
    options = ("--model", model, "--drafter", "ngram", "--temperature", "0", "--max-new-tokens", "12", *FAST)
    return run_ok("chat", *options, *arguments, stdin=stdin)


def test_chat_answers_lines_until_quit(model: str) -> None:
    once = chatted(model, "hello\n")
    assert len(once.rstrip("\n")) > 0
    twice = chatted(model, "hello\n\nand you?\n/quit\nnever read\n")
    assert twice.startswith(once) and len(twice) > len(once)


def test_chat_remembers_until_reset(model: str) -> None:
    once = chatted(model, "hello\n")
    assert chatted(model, "hello\n/reset\nhello\n") == once + once
    assert chatted(model, "hello\nhello\n") != once + once


def test_shown_drafts_leave_the_text_as_it_is(model: str) -> None:
    assert chatted(model, "hello\n", "--show-drafts") == chatted(model, "hello\n")


def test_chat_refuses_an_unknown_command(model: str) -> None:
    line = complaint("chat", "--model", model, "--drafter", "none", *FAST, stdin="/rest\n")
    assert "/rest is no command" in line and "/reset" in line


# --- bench and demo --------------------------------------------------------------------------------------------------


def test_bench_json(model: str, drafter: str, tmp_path: Path) -> None:
    prompts = tmp_path / "riddles.jsonl"
    rows = ({"turns": ["one", "two"]}, {"prompt": "three"}, {"prompt": "four", "domain": "math"})
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--model", model, "--drafter", drafter, "--max-new-tokens", "8", *FAST)
    data = json.loads(run_ok("bench", "--prompts", str(prompts), "--peer", "transformers", "--json", *options))
    assert list(data["domains"]) == ["riddles", "math"]
    assert [data["domains"][name]["prompts"] for name in data["domains"]] == [2, 1] and data["mean"]["prompts"] == 3
    mean = data["mean"]
    assert mean["identical"] == {"count": 3, "total": 3, "near_ties": 0, "largest_gap": 0.0}
    assert mean["acceptance_length"] >= 1 and mean["plain_round_ms"] > 0
    for speed in ("tokens_per_second", "plain_tokens_per_second", "peer_tokens_per_second", "speedup"):
        assert mean[speed] > 0, speed
    assert data["provenance"]["libraries"]["torch"] and data["config"]["max_new_tokens"] == 8


def test_bench_table_of_built_in_prompts(model: str) -> None:
    options = ("--model", model, "--drafter", "ngram", "--max-new-tokens", "4", "--limit", "1", *FAST)
    table = run_ok("bench", *options)
    for word in ("math", "code", "chat", "mean", "3/3"):
        assert word in table


def test_demo_shows_text_sameness_and_speed(model: str) -> None:
    shown = run_ok("demo", "--model", model, "--drafter", "ngram", "--max-new-tokens", "6", "--dtype", "float32")
    assert shown.count("identical text") == 6 and "mean" in shown and "6 of 6" in shown


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown verb": (("generat", "x"), "generat"),
    "unknown option": (("generate", "x", "--temprature", "1"), "--temprature"),
    "missing prompt": (("generate",), "prompt"),
    "not a number": (("generate", "x", "--temperature", "warm"), "--temperature"),
    "negative temperature": (("generate", "x", "--temperature", "-1"), "temperature is -1"),
    "mass above one": (("generate", "x", "--top-p", "1.5"), "top_p is 1.5"),
    "no tokens": (("generate", "x", "--max-new-tokens", "0"), "--max-new-tokens"),
    "no threads": (("generate", "x", "--threads", "0"), "--threads"),
    "unknown scheduler": (("generate", "x", "--scheduler", "best"), "best"),
    "threshold without a value": (("generate", "x", "--scheduler", "threshold"), "threshold is missing"),
    "threshold of another scheduler": (("generate", "x", "--threshold", "0.5"), "threshold is 0.5"),
    "length of another scheduler": (("generate", "x", "--scheduler", "greedy", "--verify-len", "2"), "verify_len is 2"),
    "raw with a system prompt": (("generate", "x", "--raw", "--system", "y"), "--raw"),
    "empty prompt": (("generate", "  "), "prompt is empty"),
    "model that is not there": (("generate", "x", "--model", "./nowhere"), "nowhere"),
    "prompt file that is not there": (("bench", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    "one token has no speed": (("bench", "--max-new-tokens", "1"), "max_new_tokens is 1"),
    "unknown peer": (("bench", "--peer", "abacus"), "abacus"),
}


@pytest.mark.parametrize("arguments, words", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(*arguments)


def test_mistakes_about_the_model_and_its_drafter(model: str, tmp_path: Path) -> None:
    def ask(*arguments: str) -> str:
        return complaint("generate", "x", "--model", model, *arguments)

    assert "float8" in ask("--dtype", "float8")
    assert "toaster" in ask("--device", "toaster")
    assert "sparse" in ask("--implementation", "sparse")
    assert "nowhere" in ask("--drafter", "nowhere", *FAST)
    assert "--drafter: ngram, none or a folder" in ask(*FAST)  # the one we ship is for another model
    wide = save_random_drafter(tmp_path / "wide", hidden_size=40)
    assert "hidden_size is 40" in ask("--drafter", str(wide), *FAST)
    (tmp_path / "wide" / "model.safetensors").write_bytes(b"not tensors")
    assert "damaged" in ask("--drafter", str(wide), *FAST)
    unsure = save_random_drafter(tmp_path / "unsure", confidence=False)
    assert "confidence" in ask("--drafter", str(unsure), "--scheduler", "threshold", "--threshold", "0.5", *FAST)
    assert "300" in complaint("generate", "x" * 300, "--raw", "--model", model, "--drafter", "none", *FAST)


@pytest.mark.parametrize(
    "content, words",
    [("", "no prompts"), ('{"prompt": 3}\n', "row 1"), ('{"prompt": "a"}\n{"turns": []}\n', "row 2"), ("{", ":1:")],
)
def test_malformed_prompt_files(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    line = complaint("bench", "--prompts", str(path))
    assert words in line and "prompts.jsonl" in line


def test_stdin_that_is_no_text() -> None:
    assert "UTF-8" in complaint("generate", "-", stdin=b"\xff\xfe\xff")


def test_an_interrupt_exits_with_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dspark.bundle, "load_target", interrupted)
    result = run("generate", "x", "--model", model, "--drafter", "none", *FAST)
    assert result.exit_code == 130 and "Traceback" not in result.output


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(dspark.bundle, "load_target", broken)
    result = run("generate", "x", "--model", model, "--drafter", "none", *FAST)
    assert isinstance(result.exception, AssertionError)


# --- start-up --------------------------------------------------------------------------------------------------------


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dspark.cli import app\n"
        "for words in (['--help'], ['generate', '--help'], ['--version']):\n"
        "    assert app(words, standalone_mode=False) == 0, words\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "dspark 0" in done.stdout


def test_no_verb_shows_the_help() -> None:
    result = run()
    assert "generate" in result.output and "Traceback" not in result.output
