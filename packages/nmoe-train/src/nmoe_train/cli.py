"""The console script `nmoe-train`."""

import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nmoe_train import __version__
from nmoe_train.errors import USER_ERROR
from nmoe_train.interrupt import SIGNALS, Interrupt, signal_of

if TYPE_CHECKING:
    from nmoe_train.config import Config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

DEFAULT_FILE_GB = 5.0
INTERRUPTED = tuple(128 + number for number in SIGNALS)

Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.steps=100."),
]
AllowChanges = Annotated[
    bool,
    typer.Option(help="Resume although keys that change the result are not the checkpoint's."),
]


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
    """Train Mixture-of-Experts language models."""


@app.command()
def quickstart(
    text: Annotated[
        str | None,
        typer.Option(help="Folder or file to learn from.  [default: Python's standard library]"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.  [default: runs/quickstart]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Text to a small trained model in about a minute; the same command again resumes."""
    from nmoe_train.presets import QUICKSTART

    options = {"data.text": text, "train.steps": steps, "run.dir": out, "run.device": device}
    given = {key: value for key, value in options.items() if value is not None}
    # Quoted, so that a folder called 2024 or true stays text; JSON's strings are TOML's.
    sets = [
        f"{key}={value if isinstance(value, int) else json.dumps(str(value), ensure_ascii=False)}"
        for key, value in given.items()
    ]
    _train(QUICKSTART, sets, allow_changes=False)


@app.command()
def run(config: Path, sets: Sets = None, allow_changes: AllowChanges = False) -> None:
    """Train as a TOML file says; the same command again resumes."""
    _train(config, sets or [], allow_changes=allow_changes)


@app.command()
def elastic(
    config: Path,
    workers: Annotated[int, typer.Option(min=1, help="Workers of this host.")],
    sets: Sets = None,
    expected: Annotated[
        int | None,
        typer.Option(min=1, help="Workers of all hosts.  [default: those of this host]"),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="On other hosts: the address that the first one prints.")
    ] = None,
) -> None:
    """Train on several processes, and go on when some of them die or come back."""
    from nmoe_train.config import load_config
    from nmoe_train.parallel import check_layout

    checked = load_config(config, sets or [])
    check_layout(checked)
    _check_mirror(checked)
    _spin_briefly()

    from nmoe_train.elastic_run import run_elastic, show_logs

    show_logs(logging.INFO)
    try:
        with Interrupt():
            code = run_elastic(checked, workers, expected or workers, store)
    except KeyboardInterrupt as stop:
        typer.echo("the same command goes on from what was saved")
        raise typer.Exit(128 + signal_of(stop)) from None
    raise typer.Exit(code)


@app.command()
def drill(
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 4,
    kills: Annotated[
        int, typer.Option(min=0, help="How many faults, of the kinds of --faults in turn.")
    ] = 6,
    faults: Annotated[
        str, typer.Option(help="kill, stop, slow-disk, full-disk, slow-peer, partition.")
    ] = "kill",
    seed: Annotated[int, typer.Option(help="Of what happens, and when.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the runs in this new folder.  [default: thrown away if passed]"),
    ] = None,
    sets: Sets = None,
) -> None:
    """Disturb a small training here at random instants, and see it go on by itself."""
    _spin_briefly()

    from nmoe_train.drill.command import drill_command

    code = drill_command(workers, kills, faults, seed, json_file, out, sets or [])
    raise typer.Exit(code)


checkpoint = typer.Typer(no_args_is_help=True, help="Look at checkpoints and check them.")
app.add_typer(checkpoint, name="checkpoint")


@checkpoint.command("ls")
def checkpoint_ls(run: str) -> None:
    """List the checkpoints of a run folder or URL, newest first: steps, sizes, layout, status."""
    from nmoe_train.storage.listing import list_checkpoints

    for found in list_checkpoints(run):
        layout = " ".join(f"{name}={size}" for name, size in (found.layout or {}).items())
        tokens = "" if found.tokens is None else f"{found.tokens:,} tokens"
        size = f"{found.size / 2**20:.1f} MiB in {found.files} files"
        words = (f"step {found.step}", found.status, size, tokens, layout)
        typer.echo("  ".join(word for word in words if word))


@checkpoint.command("verify")
def checkpoint_verify(place: str) -> None:
    """Read the complete checkpoints of a run folder or URL, and name every file damaged.

    One of another format, which only the nmoe-train that wrote it can read, is named as such. The
    exit code is 2 unless all are sound.
    """
    from nmoe_train.storage.listing import verify_checkpoints

    found = verify_checkpoints(place)
    for folder in found:
        typer.echo(f"{folder.name}: {folder.status}")
        for problem in folder.problems:
            typer.echo(f"error {problem}", err=True)
    if any(folder.problems for folder in found):
        raise typer.Exit(USER_ERROR)


@checkpoint.command("convert")
def checkpoint_convert(
    source: str,
    out: str,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="The weights, without what a resume needs.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the matrices: fp32, bf16, fp16.  [default: as they are]"),
    ] = None,
    file_gb: Annotated[
        float | None,
        typer.Option(min=0.001, help=f"Largest file of weights.  [default: {DEFAULT_FILE_GB:g}]"),
    ] = None,
) -> None:
    """Write a checkpoint of any layout as a run folder with one file, or its weights alone.

    SOURCE is a checkpoint, or a run folder, whose newest is taken, here or at a URL. OUT is a new
    folder.
    """
    from nmoe_data.files import os_errors

    from nmoe_train.checkpoint import convert_checkpoint, convert_weights
    from nmoe_train.errors import TrainError
    from nmoe_train.storage.target import is_url, shown

    if is_url(out):
        what = f"{shown(out)} is a URL"
        raise TrainError("E-CONVERT", what, "name a folder here, and copy it there")
    if dtype is not None and not weights_only:
        raise TrainError(
            "E-CONVERT", "--dtype would change what a resume computes", "add --weights-only"
        )
    if file_gb is not None and not weights_only:
        raise TrainError("E-CONVERT", "a run folder has one file", "drop --file-gb")
    there, tell = Path(out), partial(typer.echo, err=True)
    with os_errors("write", there):
        if weights_only:
            size = (DEFAULT_FILE_GB if file_gb is None else file_gb) * 1e9
            for file in convert_weights(source, there, dtype, size, tell):
                typer.echo(f"{file}  {file.stat().st_size / 1e6:.1f} MB")
        else:
            written = convert_checkpoint(source, there, tell)
            typer.echo(f"{written}  resume with run.dir = {out}")


@app.command()
def validate(
    config: Annotated[Path | None, typer.Argument()] = None,
    sets: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="List every key.")] = False,
) -> None:
    """Check a configuration without running it, or list every key."""
    from nmoe_train.config import describe_schema, load_config
    from nmoe_train.parallel import check_layout

    if schema:
        for path, kind, default, meaning in describe_schema():
            typer.echo(f"{path} ({kind}; {default})\n    {meaning}")
        return
    if config is None:
        raise typer.BadParameter("give a configuration file, or --schema")
    checked = load_config(config, sets or [])
    check_layout(checked)
    _check_mirror(checked)
    typer.echo(
        f"{config} is valid: {checked.train.steps} steps of {checked.tokens_per_step:,} tokens"
    )


@app.command()
def plan(
    config: Path,
    sets: Sets = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes.  [default: parallel.dp * tp * pp]"),
    ] = None,
) -> None:
    """Say what each rank would hold, keep and send, for any number of ranks, without starting."""
    from nmoe_train.config import load_config
    from nmoe_train.parallel import current_layout

    checked = load_config(config, sets or [])
    sizes = checked.parallel
    count = ranks or (sizes.dp or 1) * sizes.tp * sizes.pp
    layout = current_layout(checked, {"WORLD_SIZE": str(count)})

    from rich.console import Console

    from nmoe_train.plan import check_groups, dry_run, planned_vocabulary, summary, tables

    report = dry_run(checked, layout, planned_vocabulary(checked))
    groups = check_groups(layout)
    console = Console()
    # A table that is cut tells less than one that a pager scrolls.
    wide = Console(width=max(console.width, 200)) if not console.is_terminal else console
    wide.print(summary(report), highlight=False, soft_wrap=True)
    if groups:
        named = ", ".join(f"{name} {size}" for name, size in groups.items())
        wide.print(f"ranks of a group: {named}", highlight=False)
    for table in tables(report):
        wide.print(table)


@app.command()
def doctor() -> None:
    """Say what this machine is and what training can use of it."""
    import shutil

    import torch
    from nmoe_kernels.report import backend_table, machine_table
    from rich.console import Console

    console = Console()
    console.print(machine_table(), backend_table())
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    console.print(
        f"{torch.get_num_threads()} CPU threads, {free_gib:.1f} GiB free on the disk here"
    )


def _train(config: Path, sets: list[str], *, allow_changes: bool) -> None:
    from nmoe_train.config import load_config
    from nmoe_train.parallel import current_layout

    # Before the imports that bring torch: a mistake in the configuration shows at once.
    checked = load_config(config, sets)
    layout = current_layout(checked)
    _check_mirror(checked)

    _spin_briefly()

    from rich.console import Console

    from nmoe_train.console import ConsoleObserver
    from nmoe_train.device import pick_device
    from nmoe_train.parallel.groups import open_groups
    from nmoe_train.run import run_config

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for package in ("nmoe_train", "nmoe_data", "nmoe_kernels"):
        level = logging.INFO if layout.rank == 0 else logging.WARNING
        logging.getLogger(package).setLevel(level)
    device = pick_device(
        checked.run.device,
        deterministic=checked.run.deterministic,
        local_rank=layout.local_rank,
        local_ranks=layout.local_ranks,
    )
    observer = ConsoleObserver(Console(quiet=layout.rank != 0))
    deadline_s = checked.parallel.rdep.deadline_s
    try:
        with Interrupt(), open_groups(layout, device, deadline_s) as groups:
            try:
                outcome = run_config(checked, groups, device, observer, allow_changes=allow_changes)
            except _user_errors() as error:
                # What befalls others because of it is not told again.
                if groups.fail():
                    typer.echo(f"error {error}", err=True)
                raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt as stop:
        if _tells_for_all():
            typer.echo("the same command goes on from what was saved")
        raise typer.Exit(128 + signal_of(stop)) from None
    if outcome.stopped_by is not None:
        raise typer.Exit(128 + outcome.stopped_by)


def _check_mirror(config: "Config") -> None:
    """Before anything is trained: whether the packages of the mirror's storage are there."""
    if config.checkpoint.mirror is not None:
        from nmoe_train.storage.target import check_url

        check_url(config.checkpoint.mirror)


def _spin_briefly() -> None:
    """Keeps threads that wait from starving those that work; call it before torch is loaded.

    OpenMP's spin, for milliseconds by default, wherever the cores are shared; a short spin costs
    nothing on an idle machine.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _user_errors() -> tuple[type[Exception], ...]:
    from nmoe_data.errors import DataError
    from nmoe_kernels.errors import KernelError

    from nmoe_train.errors import TrainError

    return (TrainError, DataError, KernelError)


def _tells_for_all() -> bool:
    """Whether this process says what befalls all processes of the host alike."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def main() -> None:
    """Runs the command line; a problem the user can mend is one line and exit code 2."""
    try:
        app()
    except _user_errors() as error:
        if _tells_for_all():
            typer.echo(f"error {error}", err=True)
        sys.exit(USER_ERROR)
    except SystemExit as end:
        # A signal has ended the run, or Typer has turned an interrupt into its code.
        if end.code in INTERRUPTED and _tells_for_all():
            typer.echo("interrupted", err=True)
        raise
    except BrokenPipeError:
        # The reader of our output is gone; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
