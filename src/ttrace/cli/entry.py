"""Entry point of the `ttrace` command: however it ends, its exit code says what is known.

Python ends with 1 on an exception, rich and typer do on a broken pipe, and typer on an abort; for us 1 means that a bug
was found. So whatever is no verdict becomes one line and exit code 2 here.
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
from pathlib import Path
from typing import NoReturn

from ttrace.errors import TTraceError

_UNJUDGED = 2
_LEAST_SIGNAL = 128
"""Exit codes above say by which signal a command was ended: 130 for Ctrl-C, 143 for SIGTERM."""
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
    """What the command exits with, its output written."""
    # Here, because a library that cannot be imported is no finding either.
    from ttrace.cli.application import app

    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as error:
        is_meant = error.code in (None, 0) or _COMPLETION in os.environ  # typer's way to end a completion
        if is_meant or (isinstance(error.code, int) and error.code >= _LEAST_SIGNAL):
            raise
        raise BrokenPipeError from None  # how rich and typer end when nobody reads on
    except Exception as error:
        show = getattr(error, "show", None)  # typer's own: an option that there is not, and the like
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
    """Say why there is no verdict, to programs and to people."""
    from rich.text import Text

    from ttrace.report.terminal.console import CleanConsole

    with suppress(OSError):  # a pipe that nobody reads does not make it a finding
        if "--json" in sys.argv:
            from ttrace.report.machine.failure import make_failure_report

            sys.stdout.write(json.dumps(make_failure_report(message)) + "\n")
            sys.stdout.flush()
        CleanConsole(stderr=True).print(Text.assemble(("ttrace: ", "bold red"), message), soft_wrap=True)
    return _UNJUDGED


def _refuse_import(error: ImportError) -> int:
    """Say which library is missing; one of our own modules is our mistake."""
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
    """An exception that nobody expected: one line, and its traceback in a file."""
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
    """Nobody reads standard output any more, so nobody was told the verdict."""
    with suppress(OSError):
        # What is still to be written at exit would raise again, and Python would end with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):
        sys.stderr.write("ttrace: standard output was closed before everything was told (exit code 2).\n")
        sys.stderr.flush()
    return _UNJUDGED
