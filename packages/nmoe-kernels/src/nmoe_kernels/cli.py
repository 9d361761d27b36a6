"""The `nmoe-kernels` command: `doctor` says what this machine has and which backends it can use."""

import sys

import typer

from nmoe_kernels.errors import KernelError

INTERRUPTED = 130
"""The exit status that typer turns Ctrl-C into."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Mixture-of-Experts kernels: what runs on this machine."""


@app.command()
def doctor() -> None:
    """Show versions, GPUs, the backends usable here and why others are not, and version clashes."""
    from rich.console import Console

    from nmoe_kernels.hardware import describe, pick_backend
    from nmoe_kernels.report import CHECKED, backend_table, machine_table

    console = Console()
    console.print(machine_table(), backend_table())
    device = "cuda" if describe().gpus else "cpu"
    for dtype in CHECKED:
        picked = pick_backend(None, device, dtype)
        console.print(f"picked for {str(dtype).removeprefix('torch.')} on {device}: {picked}")
    for clash in describe().clashes:
        console.print(f"clash: {clash}", markup=False)
    if not describe().clashes:
        console.print("clashes: none found")


def main() -> None:
    """Runs the command; an error is one line on stderr and exit 2, Ctrl-C one line and 130."""
    try:
        app(standalone_mode=True)
    except KernelError as error:
        typer.echo(f"error {error}", err=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
