"""The `nmoe-kernels` command: what this machine can do, and what the kernels compile to."""

import os
import sys
from pathlib import Path
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


bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    bench, name="bench", help="Verify against fp64, then time: router, products, whole layer."
)

Device = Annotated[str, typer.Option(help="cuda or cpu.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="A preset or numbers (E-BENCH lists them); may be repeated.  [default: all]"),
]
Routings = Annotated[str, typer.Option(help="uniform, zipf, onehot, with commas, or all.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write them as a table.")]
Chart = Annotated[Path | None, typer.Option("--chart", help="Draw them as SVG.")]
Contenders = Annotated[str, typer.Option(help="Names with commas, or all.")]
FirstCall = Annotated[
    bool, typer.Option("--first-call", help="Also time a first call, caches empty and full.")
]


@bench.command("router")
def bench_router(
    device: Device = "cuda",
    shape: Shapes = None,
    routing: Routings = "uniform",
    dtype: Dtype = "bfloat16",
    contenders: Contenders = "all",
    score: Annotated[str, typer.Option(help="softmax or sigmoid.")] = "softmax",
    repeats: Repeats = 20,
    first_call: FirstCall = False,
    json_file: Json = None,
    csv_file: Csv = None,
    chart_file: Chart = None,
) -> None:
    """The router, beside eager and compiled PyTorch and a read of the tokens. Shape T,H,E,K."""
    from nmoe_kernels.bench.command import Options, run_router

    options = Options(device, shape, routing, dtype, repeats, json_file, csv_file, chart_file)
    run_router(options, contenders, score, first_call)


@bench.command("gemm")
def bench_gemm(
    device: Device = "cuda",
    shape: Shapes = None,
    routing: Routings = "uniform",
    dtype: Dtype = "bfloat16",
    contenders: Contenders = "all",
    repeats: Repeats = 20,
    json_file: Json = None,
    csv_file: Csv = None,
    chart_file: Chart = None,
) -> None:
    """The experts' six products, beside grouped_mm and dense products. Shape T,H,I,E,K."""
    from nmoe_kernels.bench.command import Options, run_gemm

    options = Options(device, shape, routing, dtype, repeats, json_file, csv_file, chart_file)
    run_gemm(options, contenders)


@bench.command("moe")
def bench_moe(
    device: Device = "cuda",
    shape: Shapes = None,
    routing: Routings = "uniform",
    dtype: Dtype = "bfloat16",
    backends: Annotated[
        str | None, typer.Option(help="Ours, with commas, or none.  [default: all]")
    ] = None,
    peers: Annotated[str, typer.Option(help="Others, with commas, all or none.")] = "all",
    repeats: Repeats = 20,
    first_call: FirstCall = False,
    json_file: Json = None,
    csv_file: Csv = None,
    chart_file: Chart = None,
) -> None:
    """The whole layer by backend, beside its peers, router included. Shape T,H,I,E,K."""
    from nmoe_kernels.bench.command import Options, run_moe

    options = Options(device, shape, routing, dtype, repeats, json_file, csv_file, chart_file)
    run_moe(options, backends, peers, first_call)


@bench.command("rdep")
def bench_rdep(
    device: Device = "cuda",
    shape: Shapes = None,
    routing: Routings = "uniform",
    dtype: Dtype = "bfloat16",
    transport: Annotated[
        str, typer.Option(help="p2p, nvshmem, collective, with commas, or all.")
    ] = "all",
    peers: Annotated[str, typer.Option(help="all_to_all, or none.")] = "all",
    blocks: Annotated[
        str, typer.Option(help="Multiprocessors that move rows, with commas.")
    ] = "8,16,24,32,64,128",
    repeats: Repeats = 20,
    json_file: Json = None,
    chart_file: Chart = None,
) -> None:
    """Dispatch and combine between the ranks of torchrun, beside all-to-all. Shape T,H,E,K."""
    from nmoe_kernels.bench.exchange.command import Options, run_exchange

    files = (json_file, chart_file)
    run_exchange(Options(device, shape, routing, dtype, transport, peers, blocks, repeats, *files))


@app.command()
def tune(
    shape: Shapes = None,
    dtype: Dtype = "bfloat16",
    repeats: Repeats = 20,
) -> None:
    """Find the fastest launches of the experts' products here, and keep them. Shape T,H,I,E,K."""
    from nmoe_kernels.bench.tune import run_tune

    run_tune(shape, dtype, repeats)


@app.command("compile-check")
def compile_check() -> None:
    """Compile every kernel for Hopper and Blackwell, with no GPU, and look for what it promises."""
    from rich.console import Console
    from rich.table import Table

    from nmoe_kernels.compile_check import GENERATIONS, check, kernels

    table = Table("kernel", "target", "matrix unit", "bulk copies", "registers", "spilled bytes")
    unit = {"sm_90a": "wgmma", "sm_100a": "tcgen05"}
    broken = []
    for kernel in kernels():
        for generation in GENERATIONS:
            found = check(kernel, generation)
            matrix = f"{found.matrix} {unit[generation]}" if kernel.multiplies else "-"
            counts = (found.bulk_copies, found.registers, found.spilled_bytes)
            table.add_row(kernel.name, generation, matrix, *map(str, counts))
            broken += [f"{kernel.name} for {generation}: {what}" for what in found.broken]
    Console(width=100).print(table)
    if broken:
        raise KernelError("E-PROMISE", "; ".join(broken), "see what the kernel was compiled to")


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
