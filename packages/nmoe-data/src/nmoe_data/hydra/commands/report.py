"""`nmoe-data hydra report`: what the heads are worth, in numbers and as a page."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    heads: Annotated[Path, typer.Option("--heads", help="What hydra train made.")],
    labels: Annotated[Path, typer.Option("--labels", help="What hydra label made.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for report.json and report.html.")],
    filtered: Annotated[
        Path | None, typer.Option("--filtered", help="What hydra filter made.")
    ] = None,
    device: Annotated[str, typer.Option(help="Of a neural encoder.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    fail_below: Annotated[
        float | None,
        typer.Option(metavar="RHO", help="Exit 2 if Spearman's correlation is lower, or none."),
    ] = None,
) -> None:
    """Measure the heads on the untouched test part of the labels."""
    from nmoe_data.hydra.report import AGREES, make_report

    result = make_report(heads, labels, out, filtered=filtered, device=device, seed=seed)
    typer.echo(f"report: {out / 'report.html'}")
    typer.echo(f"  {result.verdict}: {result.sentence}", err=result.verdict != AGREES)
    if fail_below is not None and (result.spearman is None or result.spearman < fail_below):
        typer.echo(f"the correlation is below {fail_below:g}", err=True)
        raise typer.Exit(2)
