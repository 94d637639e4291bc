"""The command. Thin: it parses, calls `build`, and turns errors into messages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from preftune import __version__
from preftune.cli_cache import cache_app
from preftune.errors import PreftuneError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tune language models on preferences, offline.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.add_typer(cache_app, name="cache")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's configuration.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Replace values: training.learning_rate=1e-5")
]


def _version(asked: bool) -> None:
    if asked:
        print(f"preftune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train a policy from a file of judgements."""
    from preftune.train import leave_process_group

    _quiet()
    _train(run_file, overrides or [])
    leave_process_group()


def _train(run_file: Path, overrides: list[str]) -> None:
    from preftune.build import build, claim_folder, describe_processes, finish
    from preftune.config import load_config

    say = _say(_console())
    config = load_config(run_file, overrides)
    claim_folder(config)
    run = build(config, announce=say)
    for line in [*describe_processes(), *(f"{key}: {value}" for key, value in run.facts().items())]:
        say(line)
    stepped = run.train()
    finish(run)  # also where no step was left: the run before may have been stopped between its last step and this
    if stepped:
        say(f"saved in {config.folder}; report: {config.folder / 'report.html'}")
    else:
        say(f"nothing left to do: {config.folder} has all its steps already")


@app.command()
def precompute(
    run_file: RunFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures for scripts.")] = False,
) -> None:
    """Compute and keep the reference values of a run's data, without training; the run then finds them."""
    from preftune.build import precompute as fill
    from preftune.config import load_config
    from preftune.train import leave_process_group

    _quiet()
    done = fill(load_config(run_file, overrides or []), _nothing if as_json else _say(_console()))
    if as_json and int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(done))
    leave_process_group()


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Where adapters, report and figures go.")] = Path("preftune-demo"),
) -> None:
    """Tune a small model on human ratings with KTO and DPO, and show what changed (under 5 minutes on 2 cores)."""
    from preftune.demo.run import run_demo

    _quiet()
    run_demo(output_dir, _console())


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run's output folder.")]) -> None:
    """Write report.html anew from a run's metrics."""
    from preftune.build import report_again

    print(report_again(folder))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of RUN.yaml; editors that know YAML schemas check and complete with it."""
    from preftune.config import RunConfig

    print(
        json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}, indent=2
        )
    )


@config_app.command("show")
def config_show(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print a run's configuration with every default filled in."""
    from preftune.config import dump_yaml, load_config

    print(dump_yaml(load_config(run_file, overrides or []).resolved()), end="")


def _say(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def _nothing(line: str) -> None:
    """Say nothing."""


def _console() -> Console:
    """Prints from the first process only; at a fixed width where no terminal tells one."""
    quiet = int(os.environ.get("RANK", "0")) != 0
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(quiet=quiet, width=110)


def _quiet() -> None:
    """Keep libraries from writing bars and notes between our own lines; their errors still come through."""
    import warnings

    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|accelerate)\.")


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0; 2 for a user's mistake; 1 for a run that had to stop; 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        app(args=[a for a in arguments if a != "--debug"])  # exits by itself, also for a wrong command or option
    except PreftuneError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == 130:  # the parser's way to end on Ctrl-C, without a word
            print("interrupted", file=sys.stderr)
        raise
