"""Runs one command line, from arguments to exit code; the only module that exits the process.

Prints errors for the user, as text or JSON. Does not know the verbs (`app.py`).
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import typer

from orchestrator.cli.app import app
from orchestrator.cli.printing import print_json
from orchestrator.errors import OrchestratorError, UsageError, one_line
from orchestrator.record.summary import failure_dict
from orchestrator.view.cells import width_of, wrapped

#: Base class of typer's errors for a bad command line: click's ClickException, or that of the copy
#: of click in newer versions of typer.
_BadCommandLine: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main() -> NoReturn:
    """Run the command line and exit."""
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    wants_json = "--json" in own  # after "--" are the arguments of another program
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print "?" for what the encoding lacks
    message = ""
    try:
        code = _invoke()
    except OrchestratorError as error:
        code, message = error.exit_code, str(error)
    except _BadCommandLine as error:
        code, message = error.exit_code, error.format_message()
        if error.ctx is not None and not wants_json and "Usage:" not in message:
            hint = f"Try '{error.ctx.command_path} --help' for help."
            # Not with `show`, which prints typed text unescaped.
            message = f"{error.ctx.get_usage()}\n{hint}\n\nError: {message}"
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("orchestrator.lab"):
            raise
        code = UsageError.exit_code
        message = "this belongs to the laboratory, orchestrator/lab, which is not installed"
    except (KeyboardInterrupt, typer.Abort):
        code, message = 130, "interrupted"
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    except Exception as error:  # noqa: BLE001 - a bug of ours; all started processes have ended
        traceback.print_exc()
        code = 1
        message = f"internal error, please report it: {type(error).__name__}: {error}"
    if message:
        _explain(message, code, wants_json=wants_json)
    sys.stdout.flush()
    sys.exit(code)


def _invoke() -> int:
    """Run the verb of the arguments and return its exit code.

    Calling `app` instead would turn Ctrl-C into a silent exit code of 130.
    """
    program = Path(sys.argv[0]).name
    command = typer.main.get_command(app)
    try:
        with command.make_context(
            "python -m orchestrator" if program == "__main__.py" else program, sys.argv[1:]
        ) as ctx:
            command.invoke(ctx)
    except typer.Exit as exit_:
        return int(exit_.exit_code)
    return 0


def _explain(message: str, code: int, *, wants_json: bool) -> None:
    # The message may contain text from the user or another head: escape its control characters.
    text = "\n".join(one_line(line) for line in message.split("\n"))
    if wants_json:
        print_json(failure_dict(text, code, "interrupted" if code == 130 else "failed"))
    else:
        print(wrapped(text, width_of(sys.stderr)), file=sys.stderr)  # noqa: T201 - the terminal
