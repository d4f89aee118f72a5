"""`dspark train` from files to a drafter: prepare, step, watch, keep the best, survive a kill.

A run folder holds
    config.json       the run's TrainConfig, hashes of its data, and the provenance of every call
    state-*/          newest training states (masters, moments); a run found there goes on from the newest
    best/             the drafter with the highest held-out acceptance so far, ready for `--drafter`
    last/             the drafter at the end of the run
    played/           rounds that the drafter plays in the run's second phase, if it has one
    log.jsonl         a line per logged step or evaluation; TensorBoard files beside it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dspark.data.features import Features, Sample
from dspark.models.checkpoint import save_drafter
from dspark.models.drafter import Drafter
from dspark.train.config import TrainConfig
from dspark.train.corpus import Corpus as Corpus
from dspark.train.corpus import load_corpus as load_corpus  # a run and what it reads are asked for together
from dspark.train.loop import choose_samples, cut_step, held_out_numbers, step_generator, step_pieces
from dspark.train.methods import Method
from dspark.train.optim import learning_rate
from dspark.train.played import PlayedRounds, keep_played, played_for, played_pieces, read_played, write_played
from dspark.train.ranks import ALONE, Ranks
from dspark.train.rounds import play_step
from dspark.train.run_folder import log, settle_dtype
from dspark.train.run_start import Run, Standing
from dspark.train.run_start import start as start
from dspark.train.slots import Piece, acceptance_figures
from dspark.train.state import save_state

Evaluate = Callable[[Corpus, TrainConfig, Drafter, Sequence[Sample]], dict[str, float]]


def train(
    config: TrainConfig,
    *,
    evaluate: Evaluate | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
    corpus: Corpus | None = None,
    steps: Callable[[int], int] | None = None,
) -> Path:
    """Run or resume a training run to its end; returns the folder of the best drafter.

    ``evaluate`` measures acceptance by decoding on held-out samples and returns at least ``acceptance_length``;
    without it the analytic value decides which checkpoint is best. ``on_step`` receives every logged line; ``stop``
    is asked between steps. ``corpus`` is what :func:`load_corpus` gives for this config, if it is there already.
    ``steps`` is asked before every step how many the run shall have in all, given those done: a run that must end at a
    certain time adapts its schedule while it goes. All processes of a run call this with their ``ranks``; the first one
    calls ``evaluate``, ``on_step`` and ``steps``. Raises :class:`RunError` if another process is gone; the newest saved
    state is whole.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import, only needed here

    config = ranks.first(lambda: settle_dtype(config))
    run = start(config, corpus or load_corpus(config, ranks), ranks=ranks)
    board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step) if ranks.leads else None
    saved = time.monotonic()
    stopping = ranks.any(stop())[0]
    while not run.finished and not stopping:
        if steps is not None:
            _lengthen(run, ranks.first(partial(steps, run.step)))
        line = _one_step(run)
        if run.step % config.log_every == 0:
            _report(run, board, line, on_step)
        if run.step % config.evaluate_every == 0 or run.step == run.config.steps:
            _report(run, board, _evaluate(run, evaluate), on_step)
        due = ranks.leads and time.monotonic() - saved > config.save_seconds
        stopping, due = ranks.any(stop(), due)
        if due or run.finished:
            _save(run)
            saved = time.monotonic()
    _save(run)
    _keep(run, run.parallel.plain(), "last")
    if board is not None:
        board.close()
    best = run.folder / "best"
    return best if ranks.first(best.is_dir) else run.folder / "last"


def _lengthen(run: Run, steps: int) -> None:
    """Let the run have ``steps`` steps in all; more than are done."""
    if steps != run.config.steps:
        run.config = replace(run.config, steps=max(steps, run.step + 1))


def _one_step(run: Run) -> dict[str, Any]:
    """Do the next step; a step that regresses states has a loss, and no acceptance to tell of."""
    begin, config = time.perf_counter(), run.config
    rate = learning_rate(
        run.step,
        config.steps,
        config.learning_rate,
        warmup=config.warmup,
        schedule=config.schedule,
        decay=config.decay,
    )
    pieces, features = _pieces(run)
    result = cut_step(run.parallel, run.optimizer, pieces, features, config, step=run.step, rate=rate, ranks=run.ranks)
    seconds, numbers, states = time.perf_counter() - begin, result.numbers, run.step < config.state_steps
    run.step += 1
    run.seconds += seconds
    run.blocks += numbers.blocks
    return {
        "loss": float(numbers.loss.detach()),
        **({} if states else acceptance_figures(numbers)),
        "gradient_norm": result.gradient_norm,
        "learning_rate": rate,
        "blocks_per_second": numbers.blocks / seconds,
        "trained_blocks_per_second": numbers.blocks / (seconds - result.feature_seconds),
        "tokens_per_second": result.tokens / seconds,
        "target_passes": run.features.computed,  # of the first process
        **({"played": features.figures()} if isinstance(features, PlayedRounds) else {}),
    }


def _pieces(run: Run) -> tuple[list[Piece], Features]:
    """What the next step learns from: blocks of the answers, or rounds that the drafter plays."""
    config, training = run.config, run.corpus.training
    if not config.plays_at(run.step):
        return step_pieces(choose_samples(training, run.step, config), config, run.step), run.features
    if run.played is None or not run.played.serves(run.step, config):
        plain = run.parallel.plain()
        step = run.ranks.first(lambda: _played_step(run, plain))
        run.played = read_played(run.folder, step, run.corpus.target.info.device)
    generator = step_generator(config.seed, run.step, 5)
    return played_pieces(run.played, config, run.step, generator), run.played


def _played_step(run: Run, method: Method) -> int:
    """The step whose playing serves the next step: one on the disk, or this one, played now."""
    found = played_for(run.folder, run.step, run.config)
    if found is None:
        stops = run.corpus.chat.stop_token_ids
        samples = run.corpus.training
        texts = play_step(method.drafter(), run.features, samples, run.config, run.step, stop_token_ids=stops)
        write_played(run.folder, run.step, texts)
    return run.step if found is None else found


def _evaluate(run: Run, evaluate: Evaluate | None) -> dict[str, Any]:
    """Held-out acceptance, analytic and by decoding; the best drafter so far is kept. The first process does it."""
    method = run.parallel.plain()
    line, run.standing = run.ranks.first(lambda: _judge(run, method, evaluate))
    return line


def _judge(run: Run, method: Method, evaluate: Evaluate | None) -> tuple[dict[str, Any], Standing]:
    analytic = held_out_numbers(method, run.features, run.corpus.held_out, run.config)
    line: dict[str, Any] = {"held_out_analytic": analytic}
    score = analytic["mean"]
    measure: list[str | int] = ["analytic"]
    if evaluate is not None and run.config.whole_target:
        chosen = run.corpus.held_out[:: max(1, len(run.corpus.held_out) // max(1, run.config.evaluate_prompts))]
        chosen = chosen[: run.config.evaluate_prompts]
        line["held_out_decoded"] = evaluate(run.corpus, run.config, method.drafter(), chosen)
        score = line["held_out_decoded"]["acceptance_length"]
        measure = ["decoded", run.config.evaluate_prompts, run.config.evaluate_tokens]
    before = run.standing if measure == run.standing.measure else Standing()  # other measures do not compare
    if not score >= before.best:  # nan, of a run that has diverged, is no drafter to keep
        return line, Standing(before.best, measure, before.stale + 1)
    _keep(run, method, "best")  # of equals the newest, whose confidences have learned longest
    return line, Standing(score, measure, 0 if score > before.best else before.stale + 1)


def _keep(run: Run, plain: Method, name: str) -> None:
    """Write the drafter as it stands; ``plain`` is whole in the first process."""
    if run.ranks.leads:
        save_drafter(run.folder / name, plain.model)


def _save(run: Run) -> None:
    standing = run.standing
    facts = {"best": standing.best, "measure": standing.measure, "stale": standing.stale}
    facts |= {"seconds": run.seconds, "blocks": run.blocks}
    save_state(run.folder, run.step, run.model, run.optimizer, facts, ranks=run.ranks)
    if run.played is not None and run.ranks.leads:
        keep_played(run.folder, first=run.played.step, last=run.step)


def _report(run: Run, board: Any, line: dict[str, Any], on_step: Callable[[dict[str, Any]], None] | None) -> None:
    if not run.ranks.leads:
        return
    line = {"step": run.step, "seconds": round(run.seconds, 1), "blocks": run.blocks, **line}
    log(run.folder, line)
    for name, value in line.items():
        for key, number in value.items() if isinstance(value, dict) else (("", value),):
            if isinstance(number, int | float):
                board.add_scalar(f"{name}/{key}" if key else name, number, run.step)
    if on_step is not None:
        on_step(line)
