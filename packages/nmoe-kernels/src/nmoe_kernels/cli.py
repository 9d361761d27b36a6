"""The `nmoe-kernels` command: `doctor` says what this machine has and which backends it can use."""

import os
import sys
from typing import Annotated

import typer

from nmoe_kernels import __version__
from nmoe_kernels.errors import KernelError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Mixture-of-Experts kernels: what runs on this machine."""


@app.command()
def doctor() -> None:
    """Show versions, GPUs, the backends usable here and why others are not, and version clashes."""
    from rich.console import Console

    from nmoe_kernels.hardware import describe, dtype_name, pick_backend
    from nmoe_kernels.report import CHECKED, backend_table, machine_table

    console = Console()
    console.print(machine_table(), backend_table())
    device = "cuda" if describe().gpus else "cpu"
    for dtype in CHECKED:
        picked = pick_backend(None, device, dtype)
        console.print(f"picked for {dtype_name(dtype)} on {device}: {picked}")
    for clash in describe().clashes:
        console.print(f"clash: {clash}", markup=False)
    if not describe().clashes:
        console.print("clashes: none found")


def main() -> None:
    """Runs the command line; a problem the user can mend is one line and exit code 2."""
    try:
        app()
    except KernelError as error:
        typer.echo(f"error {error}", err=True)
        sys.exit(2)
    except SystemExit as end:
        # Typer has turned an interrupt inside a command into this code.
        if end.code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except BrokenPipeError:
        # The reader of our output is gone; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
