"""The verb ``profile``: measure what steps and drafting cost on this machine, and write the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from dspark.bundle import Bundle
from dspark.errors import ConfigError
from dspark.evaluate.profile import draft_depth_shares, draft_seconds, step_seconds
from dspark.export.schedule import sglang_table, write_table
from dspark.schedule_files import Profile, Setting, drafter_fingerprint, folder_fingerprint


def read_numbers(text: str, *, name: str) -> tuple[int, ...]:
    """Ascending positive numbers of "1,8,64". Raises :class:`ConfigError` naming the option."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or list(numbers) != sorted(set(numbers)):
        raise ConfigError(f"{name} is {text!r}; give ascending positive numbers with commas between them, as 1,8,64")
    return numbers


def run(
    out: Path,
    *,
    model: str,
    drafter: str,
    max_tokens: int | None,
    contexts: Sequence[int],
    requests: Sequence[int],
    repeats: int,
    candidates: int,
    sglang: Path | None,
    place: dict[str, Any],
) -> None:
    """Profile ``model`` with ``drafter`` and write ``out``; print the first curve in a few points.

    ``max_tokens`` None covers four requests that draft whole blocks.
    """
    bundle = Bundle.load(model, drafter, candidates=candidates, **place)
    most = 4 * (bundle.drafter.block_size + 1) if max_tokens is None else max_tokens
    profile = measure_bundle(
        bundle,
        max_tokens=most,
        contexts=contexts,
        requests=requests,
        repeats=repeats,
        on_context=lambda context: typer.echo(f"1 to {most} tokens behind {context}, {repeats} times each", err=True),
    )
    profile.write(out)
    for line in lines(profile):
        typer.echo(line)
    typer.echo(str(out))
    if sglang is not None:
        write_table(sglang, sglang_table(profile))
        typer.echo(str(sglang))


def measure_bundle(
    bundle: Bundle,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    requests: Sequence[int],
    repeats: int,
    on_context: Callable[[int], None] = lambda context: None,
) -> Profile:
    """Steps of 1 to ``max_tokens`` tokens behind each of ``contexts``, and drafting for each number of ``requests``;
    ``on_context`` hears of every curve before it is measured."""
    per_request = bundle.drafter.block_size + 1
    curves = []
    for context in contexts:
        on_context(context)
        seconds = step_seconds(
            bundle.target,
            max_tokens=max_tokens,
            tokens_per_request=per_request,
            context=context,
            repeats=repeats,
            taps=bundle.drafter.taps,
        )
        curves.append((0.0, *(1.0 / each for each in seconds)))
    drafting, shares = tuple[float, ...](), tuple[float, ...]()
    if bundle.drafter.block_size:
        behind = {"context": contexts[0], "repeats": repeats}
        drafting = tuple(draft_seconds(bundle.target, bundle.drafter, requests=requests, **behind))
        shares = draft_depth_shares(bundle.target, bundle.drafter, requests=max(requests), **behind)
    return Profile(
        model=bundle.model,
        setting=Setting.of(bundle.target, model_fingerprint=folder_fingerprint(bundle.folder)),
        contexts=tuple(contexts),
        tokens_per_request=per_request,
        sps=tuple(curves),
        drafter=bundle.drafter.name,
        drafter_fingerprint=drafter_fingerprint(bundle.drafter_spec),
        draft_requests=tuple(requests) if drafting else (),
        draft_seconds=drafting,
        draft_depth_shares=shares,
        repeats=repeats,
    )


def lines(profile: Profile) -> list[str]:
    """A profile as text: milliseconds of a step for some numbers of tokens, a column per context, and of drafting."""
    sizes = sorted(
        {*(2**i for i in range(profile.max_tokens.bit_length())), profile.tokens_per_request, profile.max_tokens}
    )
    table = ["  tokens " + " ".join(f"{f'behind {context}':>14}" for context in profile.contexts)]
    for size in (size for size in sizes if size <= profile.max_tokens):
        table.append(f"{size:>8} " + " ".join(f"{1e3 / curve[size]:>11.2f} ms" for curve in profile.sps))
    for count, seconds in zip(profile.draft_requests, profile.draft_seconds, strict=True):
        table.append(f"drafting for {count}: {1e3 * seconds:.2f} ms")
    if profile.draft_depth_shares:
        shares = ", ".join(f"{share:.0%}" for share in profile.draft_depth_shares)
        table.append(f"of that, for 1, 2, ... drafts each: {shares}")
    return table
