"""The train verb: its options become a config, and a tiny run goes from answers to a drafter that decodes."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_chat import save_chat_model
from tiny_run import run_ranks
from typer.testing import CliRunner, Result

import dspark.train_cli as train_cli
from dspark.cli import app
from dspark.errors import ConfigError
from dspark.train.config import TrainConfig
from dspark.train.ranks import Ranks
from dspark.train_cli import evaluation_text, progress_text, read_config

# --- options ---------------------------------------------------------------------------------------------------------


def test_fields_are_read_by_the_type_of_their_defaults() -> None:
    texts = [
        "layers=1",
        "learning_rate=1",
        "taps=[0, 2]",
        "confidence=false",
        "schedule=cosine",
        "curriculum=[[1.0, 3]]",
    ]
    config = read_config({"model": "m", "steps": 9}, texts)
    assert (config.model, config.steps, config.layers, config.taps, config.confidence) == ("m", 9, 1, (0, 2), False)
    assert config.learning_rate == 1.0 and isinstance(config.learning_rate, float)
    assert config.schedule == "cosine" and config.curriculum == ((1.0, 3),)


def test_a_method_brings_its_defaults_and_the_user_overrules_them() -> None:
    assert read_config({}, []).drafter == "dspark"
    dflash = read_config({"drafter": "dflash"}, ["alpha_l1=0.5"])
    assert (dflash.markov_rank, dflash.confidence, dflash.alpha_ce, dflash.alpha_l1) == (0, False, 1.0, 0.5)
    eagle3 = read_config({"drafter": "eagle3"}, ["num_taps=3"])
    assert (eagle3.layers, eagle3.num_taps, eagle3.alpha_soft) == (1, 3, 1.0)
    with pytest.raises(ConfigError, match="drafter is 'medusa'"):
        read_config({"drafter": "medusa"}, [])
    with pytest.raises(ConfigError, match="markov_rank is 8"):
        read_config({"drafter": "mtp"}, ["markov_rank=8"])


@pytest.mark.parametrize(
    "texts, words",
    [
        (["layers"], "--set layers=VALUE"),
        (["layer=2"], "no such field"),
        (["layers=two"], "layers is 'two'"),
        (["layers=1.5"], "layers is '1.5'"),
        (["confidence=1"], "confidence is '1'"),
        (["taps=3"], "taps is '3'"),
        (["layers=1", "layers=2"], "given twice"),
        (["steps=3"], "given twice"),
        (["layers=0"], "layers is 0"),
    ],
)
def test_fields_that_cannot_be_used(texts: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        read_config({"steps": 5}, texts)


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_progress_tells_the_time_left_from_the_pace_since_the_first_report() -> None:
    line = {"step": 30, "seconds": 70.0, "loss": 1.0, "acceptance_length": 1.5, "tokens_per_second": 80.4}
    line |= {"blocks_per_second": 99.6}
    words = progress_text(line, 1830, since=(10, 30.0))  # two seconds a step, 1,800 steps to go
    assert words.startswith("30/1830, loss 1.000, acceptance length 1.50, 80 tokens/s, 100 blocks/s")
    assert words.endswith("1:00:00 left")
    assert progress_text(line, 1830, since=(30, 70.0)).endswith("...")  # no pace yet


def test_steps_that_learn_states_say_so_instead_of_an_acceptance() -> None:
    line = {"step": 3, "seconds": 7.0, "loss": 0.25, "tokens_per_second": 80.4, "blocks_per_second": 99.6}
    words = progress_text(line, 30, since=(1, 3.0))
    assert words.startswith("3/30, learning the target's states, error 0.250, 80 tokens/s") and "nan" not in words


def test_evaluations_show_decoded_before_analytic_acceptance() -> None:
    assert evaluation_text({"step": 1, "loss": 2.0}) is None
    line = {"held_out_analytic": {"mean": 1.25}, "held_out_decoded": {"acceptance_length": 1.5, "math": 2.0}}
    assert evaluation_text(line) == "held-out acceptance length, decoded: acceptance_length 1.50, math 2.00"
    del line["held_out_decoded"]
    assert evaluation_text(line) == "held-out acceptance length, analytic: mean 1.25"


def test_the_first_interrupt_is_a_flag_and_the_second_is_none() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), train_cli._first_interrupt() as came:
        assert not came()
        signal.raise_signal(signal.SIGINT)
        assert came()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"))


def train_command(model: Path, folder: Path, *extra: str) -> list[str]:
    """Twelve short answers and the command that trains on them."""
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    rows = range(12)
    prompts.write_text(
        "".join(json.dumps({"id": f"p{i}", "turns": [f"number {i}"], "domain": "ab"[i % 2]}) + "\n" for i in rows)
    )
    answers.write_text(
        "".join(
            json.dumps({"id": f"p{i}", "sample": 0, "answer_ids": [40 + (i + k) % 7 for k in range(30)]}) + "\n"
            for i in rows
        )
    )
    fields = {
        "layers": 1,
        "block_size": 3,
        "markov_rank": 4,
        "taps": [0, 2],
        "draft_vocab": 0,
        "mask_token_id": 3,
        "held_out": 4,
        "sequences_per_step": 2,
        "slots_per_step": 24,
        "log_every": 2,
        "evaluate_every": 4,
        "evaluate_prompts": 2,
        "evaluate_tokens": 6,
        "dtype": "float32",
    }
    sets = [word for name, value in fields.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    out = ("--out", str(folder / "run"), "--model", str(model))
    return ["train", "--answers", str(answers), "--prompts", str(prompts), *out, *sets, *extra]


def invoke(command: list[str]) -> Result:
    return CliRunner().invoke(app, command)


def test_a_run_ends_with_a_drafter_that_decodes(model: Path, tmp_path: Path) -> None:
    done = invoke(train_command(model, tmp_path, "--steps", "4"))
    assert done.exit_code == 0, (done.output, done.exception)
    best = Path(done.stdout.strip())
    assert best == tmp_path / "run" / "best"
    assert "4/4, loss" in done.stderr and "held-out acceptance length, decoded" in done.stderr
    command = ["generate", "number 3", "--model", str(model), "--dtype", "float32", "--max-new-tokens", "8", "--json"]
    drafted, plain = (json.loads(invoke([*command, "--drafter", d]).stdout) for d in (str(best), "none"))
    assert drafted["token_ids"] == plain["token_ids"] and len(drafted["prefix_acceptance"]) > 0


def test_another_method_is_a_word_on_the_command_line(model: Path, tmp_path: Path) -> None:
    command = train_command(model, tmp_path, "--steps", "2", "--drafter", "eagle3")
    command = [word.replace("markov_rank=4", "markov_rank=0") for word in command]
    done = invoke(command)
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads((tmp_path / "run" / "best" / "config.json").read_text())["ttt_length"] == 3
    command = ["generate", "number 3", "--model", str(model), "--dtype", "float32", "--max-new-tokens", "8", "--json"]
    drafted, plain = (json.loads(invoke([*command, "--drafter", d]).stdout) for d in (done.stdout.strip(), "none"))
    assert drafted["token_ids"] == plain["token_ids"]


def test_an_interrupted_run_is_saved_and_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = train_cli._Board.show

    def interrupt_once(board: train_cli._Board, line: dict) -> None:
        shown(board, line)
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(train_cli._Board, "show", interrupt_once)
    first = invoke(train_command(model, tmp_path, "--steps", "4"))
    assert first.exit_code == 130 and "the same command goes on" in first.stderr, (first.output, first.exception)
    monkeypatch.undo()
    second = invoke(train_command(model, tmp_path, "--steps", "4"))
    assert second.exit_code == 0, (second.output, second.exception)
    assert "2/4" not in second.stderr and "4/4" in second.stderr


def test_mistakes_end_in_one_line(model: Path, tmp_path: Path) -> None:
    for extra, words in ((["--set", "layer=1"], "no such field"), (["--answers", "nowhere.jsonl"], "nowhere.jsonl")):
        failed = invoke(train_command(model, tmp_path, *extra))
        assert failed.exit_code == 2 and words in failed.stderr and failed.stderr.count("\n") == 1, failed.output
    assert isinstance(read_config({}, []), TrainConfig)


def test_the_plan_names_what_bounds_each_part_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    done = invoke(train_command(model, tmp_path, "--plan"))
    assert done.exit_code == 0, (done.output, done.exception)
    found = done.stdout.splitlines()
    assert found[0].startswith("target") and "blocks_per_pass" in done.stdout and found[-1].startswith("together")
    assert not (tmp_path / "run").exists()


def in_two_processes(ranks: Ranks, command: list[str], folder: Path) -> None:
    config = read_config({"steps": 4, **json.loads(command[0])}, command[1:])
    with (
        open(folder / f"out-{ranks.rank}", "w") as out,
        open(folder / f"errors-{ranks.rank}", "w") as errors,
        redirect_stdout(out),
        redirect_stderr(errors),
    ):
        assert train_cli.run(config)


def test_of_two_processes_the_first_one_speaks(model: Path, tmp_path: Path) -> None:
    command = train_command(model, tmp_path)
    given = {"model": str(model), "out": str(tmp_path / "run")}
    given |= {name: [str(tmp_path / f"{name}.jsonl")] for name in ("answers", "prompts")}
    sets = [value for option, value in pairwise(command) if option == "--set"]
    sets += [f"{name}={json.dumps(given.pop(name))}" for name in ("answers", "prompts")]
    assert run_ranks(2, in_two_processes, [json.dumps(given), *sets], tmp_path, join=False) == [0, 0]
    assert (tmp_path / "out-0").read_text().strip() == str(tmp_path / "run" / "best")
    assert "4/4, loss" in (tmp_path / "errors-0").read_text()
    assert (tmp_path / "out-1").read_text() == "" and "loss" not in (tmp_path / "errors-1").read_text()
