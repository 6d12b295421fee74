"""Entry point of the `ttrace` command, with every command by name.

Python exits with 1 after an exception, rich and typer after a broken pipe, and typer after an abort. For TTrace, 1
means that a bug was found. So everything that is not a verdict becomes one line and exit code 2 here.

Neither this module nor those of the commands import torch before a command runs: `ttrace --help` is quick, and works
where torch cannot be imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ttrace.cli.commands.bundle import bundle
from ttrace.cli.commands.check import check
from ttrace.cli.commands.compare import compare
from ttrace.cli.commands.demo import demo
from ttrace.cli.commands.diff import diff
from ttrace.cli.commands.doctor import doctor
from ttrace.cli.commands.explain import explain
from ttrace.cli.commands.lint import lint
from ttrace.cli.commands.map import show_map
from ttrace.cli.commands.report import report
from ttrace.cli.commands.run import run
from ttrace.cli.commands.selftest import selftest
from ttrace.cli.commands.show import show
from ttrace.cli.commands.sweep import sweep
from ttrace.cli.commands.trace import trace
from ttrace.cli.options import PanelCommand, expand_groups
from ttrace.errors import TTraceError
from ttrace.untrusted import LIMITS_VARIABLE

_UNJUDGED = 2
_LEAST_SIGNAL = 128
"""Exit codes above this one name the signal that ended a command: 130 for Ctrl-C, 143 for SIGTERM."""
_COMPLETION = "_TTRACE_COMPLETE"
"""The variable by which a shell asks for completions."""
_NEEDED = {"torch": "PyTorch 2.8 or later"}


def main() -> NoReturn:
    """Run the command, and exit."""
    # A cancelled CI job sends SIGTERM: end like Ctrl-C does, with everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_LEAST_SIGNAL + signal.SIGTERM))
    _hide_numpy_warning()
    try:
        code = _run()
    except TTraceError as error:
        code = _refuse(str(error))
    except KeyboardInterrupt:
        code = _LEAST_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        code = _end_unread()
    except ImportError as error:
        code = _refuse_import(error)
    except Exception as error:
        code = _fail(error)
    sys.exit(code)


def _run() -> int:
    """Run the command, write its output, and return its exit code."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as error:
        is_meant = error.code in (None, 0) or _COMPLETION in os.environ  # typer's way to end a completion
        if is_meant or (isinstance(error.code, int) and error.code >= _LEAST_SIGNAL):
            raise
        raise BrokenPipeError from None  # how rich and typer end when standard output is closed
    except Exception as error:
        show = getattr(error, "show", None)  # typer's own errors, such as an unknown option
        if show is None:
            raise
        show()
        return _UNJUDGED
    return int(code or 0)


def _hide_numpy_warning() -> None:
    """Hide torch's warning where NumPy is absent: TTrace does not need it. Worker processes inherit the option."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    sys.warnoptions.append("ignore:Failed to initialize NumPy:UserWarning")


def _refuse(message: str) -> int:
    """Report why there is no verdict, to programs and to people."""
    from rich.text import Text

    from ttrace.report.refusal import CleanConsole

    with suppress(OSError):  # a closed pipe must not change the exit code
        if "--json" in sys.argv:
            from ttrace.report.refusal import make_failure_report

            sys.stdout.write(json.dumps(make_failure_report(message)) + "\n")
            sys.stdout.flush()
        CleanConsole(stderr=True).print(Text.assemble(("ttrace: ", "bold red"), message), soft_wrap=True)
    return _UNJUDGED


def _refuse_import(error: ImportError) -> int:
    """Report which library is missing; a missing module of TTrace is a mistake of ours."""
    if error.name is None or error.name.split(".")[0] == "ttrace":
        return _fail(error)
    name = error.name.split(".")[0]
    message = f"{name} cannot be imported: {error}. Install {_NEEDED.get(name, name)} in this environment."
    try:
        return _refuse(message)
    except ImportError:  # rich itself
        sys.stderr.write(f"ttrace: {message}\n")
        return _UNJUDGED


def _fail(error: Exception) -> int:
    """Report an unexpected exception in one line, and write its traceback to a file."""
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="ttrace-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write(text)
        where = f"the traceback is in {Path(file.name)}"
    except OSError:
        where = f"the traceback cannot be written to a file:\n{text}"
    words = " ".join(str(error).split())[:300]
    described = f"{type(error).__name__}: {words}" if words else type(error).__name__
    try:
        return _refuse(
            f"could not judge, because of an unexpected {described}. Please report it, with the output of "
            f"`ttrace doctor`; {where}"
        )
    except Exception:  # for instance a library that cannot be imported, and is needed for the report
        sys.stderr.write(f"ttrace: could not judge, because of an unexpected {described}; {where}\n")
        return _UNJUDGED


def _end_unread() -> int:
    """Report that standard output was closed, so the verdict did not arrive."""
    with suppress(OSError):
        # What is still to be written at exit would raise again, and Python would end with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        sys.stderr.write("ttrace: standard output was closed before the result was printed (exit code 2).\n")
        sys.stderr.flush()
    return _UNJUDGED


app = typer.Typer(
    name="ttrace",
    help="Find silent bugs in distributed training by comparing it with a trusted reference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    demo,
    run,
    sweep,
    trace,
    check,
    report,
    show,
    diff,
    explain,
    compare,
    bundle,
    lint,
    selftest,
    doctor,
):
    app.command(cls=PanelCommand)(expand_groups(command))
app.command("map")(show_map)


@app.callback(invoke_without_command=True)
def apply_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
    limits: Annotated[
        int, typer.Option(min=1, help="Accept files of traces that are this many times larger than usual.")
    ] = 1,
) -> None:
    """Find silent bugs in distributed training by comparing it with a trusted reference."""
    if limits != 1:
        os.environ[LIMITS_VARIABLE] = str(limits)  # for the processes that work for this one, too
    if version:
        typer.echo(metadata.version("torch-ttrace"))
        raise typer.Exit
