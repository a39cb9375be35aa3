"""The command ``ratp``."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from ratp import __version__
from ratp.cli import (
    adopt,
    data,
    demo,
    deploy,
    doctor,
    export,
    lists,
    predict,
    reports,
    run_file,
    runs,
    serve,
    studies,
    switches,
    verify,
    watch,
    weights,
)
from ratp.cli.console import print_error, spread_targets
from ratp.errors import ConfigError, RatpError, print_plainly

app = typer.Typer(
    help="Train an image classifier on one labelled domain, and adapt it to unlabelled ones that come later.\n\n"
    "Start with [bold]ratp demo[/] (two to three minutes), or with your own images: "
    "[bold]ratp run folders --source day/ --targets rain/ night/[/]",
    epilog="[bold]ratp COMMAND --help[/] explains a command.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# The commands as `ratp --help` lists them.
_PANELS: dict[str, dict[str, tuple[Any, str]]] = {
    "Start here": {
        "demo": (demo.demo, "Compare RaTP with no adaptation, on built-in images."),
        "run": (runs.run, "Train a model and adapt it, on your images or a benchmark."),
        "predict": (predict.predict, "Classify images with a trained model."),
        "report": (reports.report, "Make tables, plots and an HTML page from finished runs."),
        "doctor": (doctor.doctor, "Check this machine, and say how to fix what is wrong."),
    },
    "Look up": {
        "methods": (lists.methods, "List the methods, or those that suit what you have."),
        "streams": (lists.streams, "List the streams of domains, and show their images."),
        "switches": (switches.list_switches, "List all settings of a stream and a method."),
    },
    "Keep a model in use": {
        "adopt": (adopt.adopt, "Take over a classifier that was trained elsewhere."),
        "deploy": (deploy.deploy, "Put a trained model into use."),
        "watch": (watch.watch, "Classify images as they appear in a folder."),
        "serve": (serve.serve, "Classify images over HTTP."),
        "versions": (deploy.versions, "List the versions of a deployed model, or go back."),
        "export": (export.export, "Write a trained model to a file that runs without ratp."),
    },
    "Experiments and files": {
        "study": (studies.app, "Run and compare many runs that a file lists."),
        "data": (data.app, "Download, import, build and check images."),
        "verify": (verify.verify, "Find damaged files in runs, results or a cache."),
        "import-weights": (weights.import_weights, "Take a backbone's weights out of a checkpoint."),
    },
}
for _panel, _commands in _PANELS.items():
    for _name, (_command, _summary) in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, short_help=_summary, rich_help_panel=_panel)
        else:
            app.command(_name, short_help=_summary, rich_help_panel=_panel)(_command)


def _print_version(value: bool) -> None:
    if value:
        print(f"ratp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that need no command."""
    del version


def main() -> None:
    """Runs the command line; a user's mistake gives a message and exit code 2, never a traceback."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # for encodings without × and ✓
        print_plainly()
        words = spread_targets(sys.argv[1:])
        if any(word.endswith(".toml") for word in words):
            words = run_file.expand(words, _options_of_run())
        app(words or ["--help"], prog_name="ratp")
    except RatpError as error:
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        for problem in problems:
            print_error(problem)
        sys.exit(2)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # raised while a class was created, before Python 3.12
            sys.exit(128 + signal.SIGINT)
        from ratp.methods.custom import own_traceback

        message = own_traceback(error) or _disk_full(error) or _no_memory(error)
        if message is None:
            raise
        print_error(message)
        sys.exit(1)
    except KeyboardInterrupt:  # before a command began
        sys.exit(128 + signal.SIGINT)


def _options_of_run() -> list[Any]:
    commands: Any = typer.main.get_command(app)
    return list(commands.commands["run"].params)


def _no_memory(error: Exception) -> str | None:
    """The message for a GPU without memory left; None for any other error."""
    if type(error).__name__ != "OutOfMemoryError":  # torch may not be imported
        return None
    reason = str(error).partition(". ")[0]
    return (
        f"the memory of the GPU ran out ({reason}). Finished stages are kept: the same command continues after them. A "
        "smaller --batch or --size needs less, and --images streamed keeps the images off the GPU."
    )


def _disk_full(error: Exception) -> str | None:
    """The message for a full disk; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit would fail again
    return f"cannot write {error.filename or 'to standard output'}: {error.strerror}. What was saved before is intact."
