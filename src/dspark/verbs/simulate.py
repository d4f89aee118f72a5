"""``simulate``: serving under load without a model, and the interactive page of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspark.errors import ConfigError
from dspark.verbs.options import CalibrationFile, Json, Seed, print_json

COSTS, ACCEPTANCE, LOAD, FLEET, PAGE = "What a step costs", "What is accepted", "Load", "Fleet", "Page"


def simulate(
    schedulers: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler",
            help="none, mtp-1, fixed, fixed:3, threshold:0.7, greedy, lagged, skip, gate:lagged and the like; may be "
            "repeated; default: all of them.",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Users who each ask again at once, as 1,8,64.", rich_help_panel=LOAD)
    ] = "1,2,4,8,16,32,64,128,256",
    rate: Annotated[
        str | None,
        typer.Option(help="Instead: requests a second at random times, as 0.5,1,2.", rich_help_panel=LOAD),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Instead: JSONL of arrival (seconds), prompt_tokens, output_tokens.", rich_help_panel=LOAD),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="File of `profile`; default: a curve of a GPU's shape (--set).", rich_help_panel=COSTS),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Go on straight behind the profile's end.", rich_help_panel=COSTS)
    ] = False,
    mtp_profile: Annotated[
        Path | None, typer.Option(help="Profile with an MTP-1 drafter, for its drafting.", rich_help_panel=COSTS)
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder of `eval` with rounds to replay; default: a model (--set).", rich_help_panel=ACCEPTANCE
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--of", help="Only this set of the records; repeatable.", rich_help_panel=ACCEPTANCE),
    ] = None,
    mtp_records: Annotated[
        Path | None, typer.Option(help="Records of an MTP-1 drafter.", rich_help_panel=ACCEPTANCE)
    ] = None,
    calibration: CalibrationFile = None,
    numbers: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A number of the simulation as name=value: floor_ms, us_per_token, tile, draft_floor_ms, "
            "draft_us_per_slot, conditional=[0.8,0.7], spread, sharpness, overconfidence, prompt_tokens, "
            "output_tokens, seats, prefill_tokens, prefill_elsewhere=true, steps, requests, ... May be repeated.",
        ),
    ] = None,
    seed: Seed = 0,
    user_speed: Annotated[
        str | None,
        typer.Option(help="Speeds to plan for, a user's tokens per second, as 30,80.", rich_help_panel=FLEET),
    ] = None,
    first_token: Annotated[
        float | None,
        typer.Option(help="Most seconds to the first token, for 95 % of the answers.", rich_help_panel=FLEET),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="Users of the whole fleet, for --user-speed.", rich_help_panel=FLEET)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File of the results for `report`; with --web, of the page.")] = None,
    as_json: Json = False,
    web: Annotated[
        bool,
        typer.Option("--web", help="Open the scheduler's interactive page instead.", rich_help_panel=PAGE),
    ] = False,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it, or only say where it lies.", rich_help_panel=PAGE)
    ] = True,
) -> None:
    """Simulate serving under load with every scheduler, to compare them and to plan a fleet."""
    from dspark.simulate import desk

    if web:
        desk.show_page(out, profile=profile, browser=browser)
        return
    if user_speed is None and (users is not None or first_token is not None):
        raise ConfigError("--users and --first-token plan for a speed; give --user-speed as well")
    from dspark.simulate.fleet import Goal
    from dspark.simulate.setup import Sources, scene_of

    sources = Sources(
        profile=profile,
        mtp_profile=mtp_profile,
        extrapolate=extrapolate,
        records=records,
        mtp_records=mtp_records,
        sets=tuple(sets or ()),
        calibration=calibration,
    )
    scene = scene_of(sources, numbers or [], {"seed": seed})
    load = desk.Load.read(concurrency=concurrency, rate=rate, trace=trace)
    speeds = () if user_speed is None else desk.read_rates(user_speed, name="--user-speed")
    goals = [Goal(user_speed=speed, first_token=first_token, users=users) for speed in speeds]
    content = desk.run(scene, schedulers or [], load, goals=goals, quiet=as_json)
    if out is not None:
        desk.write(out, content)
    if as_json:
        print_json(content)
