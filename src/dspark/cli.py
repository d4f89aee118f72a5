"""The command line: one verb per stage. Options are parsed here; the work is done in the modules they name.

Whatever a user can do wrong ends in one line on stderr and exit code 2; an interrupt exits with 130. Heavy imports stay
inside the verbs, so that ``dspark --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import dspark
from dspark import cache_cli
from dspark.errors import DsparkError
from dspark.verbs import decoding, evaluating, formats, load, material, measuring, report, serve, simulate, training
from dspark.verbs.options import EXIT_INTERRUPTED, EXIT_USER_ERROR


class OneLineErrors(TyperGroup):
    """A command group that reports a user's mistakes in one line instead of a traceback or a box."""

    def main(  # the signature is typer's
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a verb and, unless ``standalone_mode`` is False, exit with its code."""
        try:
            # an interrupt comes back as 130, the result of a verb as None
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra) or 0
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except (typer.TyperException, DsparkError, OSError) as error:
            typer.echo(f"dspark: {_one_line(error)}", err=True)
            code = EXIT_USER_ERROR
        if standalone_mode:
            sys.exit(code)
        return code


def _one_line(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


app = typer.Typer(
    cls=OneLineErrors,
    help="Lossless speculative decoding: the same output as the model alone, in less time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"dspark {dspark.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _dspark(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


_VERBS: dict[str, Callable[..., None]] = {
    "generate": decoding.generate,
    "chat": decoding.chat,
    "serve": serve.serve,
    "accelerate": training.accelerate,
    "prompts": material.prompts,
    "answers": material.answers,
    "train": training.train,
    "audit": measuring.audit,
    "eval": evaluating.evaluate,
    "calibrate": measuring.calibrate,
    "profile": measuring.profile_costs,
    "simulate": simulate.simulate,
    "report": report.report,
    "demo": decoding.demo,
    "inspect": formats.inspect,
    "convert": formats.convert,
}
for _name, _verb in _VERBS.items():
    app.command(_name)(_verb)
_bench = typer.Typer()
_bench.callback(invoke_without_command=True)(measuring.bench)
_bench.command("serve")(load.bench_serve)
app.add_typer(_bench, name="bench")
app.add_typer(cache_cli.app, name="cache")


def main() -> None:
    """Entry point of the ``dspark`` command."""
    # OpenMP threads that wait for each other without yielding stall for milliseconds when another process takes a core.
    # A bounded spin costs nothing on a quiet machine; it must be set before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    app()
