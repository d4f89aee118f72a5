"""The first two stages: prompts, given or written by the model, and its own answers to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from dspark.artifacts import atomic_write_text, read_jsonl
from dspark.core import SamplingParams
from dspark.data.answer_file import AnswerFile, answer_settings, manifest_path
from dspark.data.answers import make_jobs, sample_answers
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.self_prompts import DraftFile, Selection, SelfPromptConfig, draft_settings, select, write_drafts
from dspark.errors import DataError
from dspark.prompts_cli import Source, gather, write_prompts
from dspark.road.budget import Deadline, TimeUp
from dspark.road.ledger import Facts
from dspark.road.road import Road

SIMILARITY = 0.7  # of two prompts that count as one, so that held-out ones are not known from training
MOST_SAMPLES = 8  # answers to one prompt, where there are fewer prompts than answers wanted
MOST_HUB_ROWS = 200_000
ANSWER_TEMPERATURE = 0.8
PARTS = ("training", "calibration", "compare")
LEAST_TRAINING = 8  # prompts


def part_path(road: Road, part: str) -> Path:
    return road.work / f"{part}.jsonl"


def answers_path(road: Road) -> Path:
    """All answers in the order of their prompts, whatever the order in which they ended; there once the stage is
    done."""
    return road.work / "answers.jsonl"


def make_prompts(road: Road) -> Facts:
    """Get prompts and deal them out: to training, to calibration, and to the comparison."""
    refused: list[str] = []
    if road.config.prompts is None:
        found, refused = _written(road)
    else:
        path = Path(road.config.prompts)
        source = Source(files=(path,)) if path.is_file() else Source(hub=road.config.prompts, split=road.config.split)
        gathered = gather(source, similarity=SIMILARITY, limit=None if path.is_file() else MOST_HUB_ROWS)
        found, refused = gathered.prompts, list(gathered.refusals)
    for line in refused:
        road.progress.say(line)
    if later := sum(len(prompt["turns"]) > 1 for prompt in found.values()):
        road.progress.say(f"{later} prompts have later turns, which are not asked: answers to the first ones teach")
    parts = deal(found, road)
    for name, prompts in parts.items():
        write_prompts(part_path(road, name), prompts.values())
    return {name: len(prompts) for name, prompts in parts.items()} | {"refused": refused}


def deal(found: Mapping[str, Prompt], road: Road) -> dict[str, dict[str, Prompt]]:
    """Prompts for each part, in an order that depends on their ids alone; with few prompts the small parts shrink."""
    plan = road.plan
    ordered = sorted(found, key=lambda key: hashlib.sha256(key.encode()).digest())
    ordered = ordered[: plan.prompts]
    share = len(ordered) / plan.prompts
    compare, calibration = (max(2, int(share * n)) for n in (plan.compare_prompts, plan.calibration_prompts))
    if len(ordered) < compare + calibration + LEAST_TRAINING:
        raise DataError(
            f"prompts are {len(ordered)}; {LEAST_TRAINING + 4} different ones are needed to train, to calibrate and "
            "to compare: give more, or none, and the model writes its own"
        )
    cuts = {"compare": ordered[:compare], "calibration": ordered[compare : compare + calibration]}
    cuts["training"] = ordered[compare + calibration :]
    return {name: {key: found[key] for key in cuts[name]} for name in PARTS}


def _written(road: Road) -> tuple[dict[str, Prompt], list[str]]:
    """Prompts that the model writes, until there are as many as planned or the time for them is over."""
    config = SelfPromptConfig(
        count=road.plan.prompts, seed=road.config.seed, max_new_tokens=min(256, road.target.info.max_len // 2)
    )
    file = DraftFile(road.work / "prompts.jsonl", draft_settings(road.config.model, road.chat, config))
    least = max(LEAST_TRAINING + 4, road.plan.prompts // 8)

    def selected() -> Selection:
        return select(list(file.drafts.values()), config)

    def enough() -> bool:
        return not road.fixed and len(file.drafts) >= least and len(selected().prompts) >= least

    deadline = Deadline(road.budget, road.end_of("prompts"), enough, road.ledger.beat)
    chosen = selected()

    def on_pass(tokens: int) -> None:
        road.progress.show(f"{len(file.drafts)} prompts drafted", len(chosen.prompts) / config.count)
        deadline()

    try:
        for selection in write_drafts(road.target, road.chat, file, config, rows=road.probe.rows, on_pass=on_pass):
            chosen = selection
    except TimeUp:
        chosen = selected()
    counts = [f"{count} of the model's own prompts refused, {reason}" for reason, count in chosen.refused.items()]
    return {prompt["id"]: prompt for prompt in chosen.prompts}, counts


def make_answers(road: Road) -> Facts:
    """Let the target answer the training prompts, once or several times each, until there are as many answers as
    planned or the time for them is over."""
    prompts = read_prompts([part_path(road, "training")])
    samples = max(1, min(MOST_SAMPLES, -(-road.plan.answers // len(prompts))))
    sampling = SamplingParams(temperature=ANSWER_TEMPERATURE, seed=road.config.seed)
    longest = min(road.config.max_new_tokens, road.target.info.max_len - 1)
    settings = answer_settings(road.config.model, road.chat, sampling, max_new_tokens=longest)
    file = AnswerFile(road.work / "drawn.jsonl", settings, prompts)
    todo = make_jobs(prompts, road.chat, samples=samples, max_len=road.target.info.max_len, history=file.history)
    if todo.skipped:
        road.progress.say(f"{len(todo.skipped)} prompts are as long as the model's context, and left out")
    wanted = min(road.plan.answers, file.answers + len(todo.jobs))
    jobs = todo.jobs[: max(0, wanted - file.answers)]
    least = min(wanted, LEAST_TRAINING)
    before = file.answers

    def enough() -> bool:
        return not road.fixed and file.answers >= least

    deadline = Deadline(road.budget, road.end_of("answers"), enough, road.ledger.beat)

    def on_pass(tokens: int) -> None:
        road.progress.show(f"{file.answers} of {wanted} answers", file.answers / max(1, wanted))
        deadline()

    try:
        for answer in sample_answers(
            road.target,
            jobs,
            sampling=sampling,
            max_new_tokens=longest,
            stop_token_ids=road.chat.stop_token_ids,
            rows=road.probe.rows,
            on_pass=on_pass,
        ):
            file.add(answer, road.chat)
    except TimeUp:
        road.progress.say(f"time is up for answers: {file.answers} of {wanted}")
    tokens = sort_answers(file.path, list(prompts), answers_path(road))
    return {"answers": file.answers, "tokens": tokens, "kept_from_before": before, "samples": samples}


def sort_answers(drawn: Path, order: list[str], out: Path) -> int:
    """Write the answers in the order of their prompts, so that a kill leaves no trace in what is trained on; returns
    their tokens."""
    place = {key: i for i, key in enumerate(order)}
    rows = sorted(read_jsonl(drawn, allow_torn_tail=True), key=lambda row: (row["sample"], place[row["id"]]))
    atomic_write_text(manifest_path(out), manifest_path(drawn).read_text(encoding="utf-8"))
    atomic_write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return sum(len(row["answer_ids"]) for row in rows)
