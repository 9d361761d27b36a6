"""The command line: serve, query, export and alert read run folders; demo writes some to try.

`alert --write-events` is the only one that writes into a run folder, a line of events at a time.
"""

import csv
import errno
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nviz import __version__
from nviz.errors import VizError
from nviz.variables import RULES_VARIABLE, RUNS_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from nviz.alerts import Change, Rule
    from nviz.store.database import Answer
    from nviz.store.remote import Mirror

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
Runs = Annotated[
    str,
    typer.Argument(help="Folder that holds runs, or one run's folder; or a URL: s3://bucket/runs"),
]

# Windows has none; there Streamlit ends by itself on Ctrl-C.
HAS_SIGNAL_MASK = hasattr(signal, "pthread_sigmask")

# Nothing leaves the machine, nothing watches files, no menu for developers.
STREAMLIT_OPTIONS: dict[str, Any] = {
    "browser_gatherUsageStats": False,
    "server_headless": True,
    "server_fileWatcherType": "none",
    "server_showEmailPrompt": False,
    "server_maxUploadSize": 1,
    "client_toolbarMode": "minimal",
    "client_showErrorDetails": "none",
    "logger_level": "error",
    "theme_headingFontSizes": ["2rem", "1.6rem", "1.4rem", "1.2rem", "1.05rem", "1rem"],
    "theme_metricValueFontSize": "1.45rem",
    "theme_paddingTop": "1rem",
    "theme_paddingBottom": "2rem",
}


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
    """Dashboard and SQL over training runs. Reads run folders while trainers write them."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(host: str, given: str | None) -> str:
    """The token that every session must give: `given`, or a new one if others can reach `host`."""
    if given or is_loopback(host):
        return given or ""
    return secrets.token_urlsafe(24)


def check_port(host: str, port: int) -> None:
    """Raises VizError `E-PORT` if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise VizError(
            "E-PORT", f"there is no host {host} ({error.strerror})", "give an address to --host"
        ) from error
    except OSError as error:
        elsewhere = error.errno == errno.EADDRNOTAVAIL
        raise VizError(
            "E-PORT",
            f"cannot listen on {host}:{port} ({error.strerror})",
            "give an address of this machine to --host" if elsewhere else "choose another --port",
        ) from error


def check_folder(runs: Path) -> None:
    """Raises VizError `E-RUNS-MISSING` if `runs` is no readable folder."""
    if not runs.is_dir() or not os.access(runs, os.R_OK | os.X_OK):
        raise VizError(
            "E-RUNS-MISSING",
            f"{runs} is not a folder that can be read",
            "give the folder that holds the runs, or one run's folder",
        )


def mirror_of(runs: str) -> "Mirror | None":
    """The mirror of a URL, not brought up to date yet, or None for a local folder.

    Raises VizError `E-RUNS-MISSING` for a folder that cannot be read, or as `Mirror` does.
    """
    from nviz.store import remote

    if remote.is_url(runs):
        return remote.mirror_of(runs)
    check_folder(Path(runs))
    return None


def folder_of(runs: str) -> Path:
    """The folder to read for `runs`: itself, or the mirror of a URL as of now."""
    mirror = mirror_of(runs)
    if mirror is None:
        return Path(runs)
    mirror.refresh()
    for problem in mirror.state.left_out:
        typer.echo(f"warning not copied: {_printable(problem)}", err=True)
    return mirror.root


def address(host: str, port: int, token: str = "") -> str:
    """The dashboard's address for a browser, with the token that opens it.

    Of a host that means all of this machine's addresses, the machine's name.
    """
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}" + (f"/?token={token}" if token else "")


@contextmanager
def sigint_waits() -> Iterator[None]:
    """Blocks SIGINT in this thread, and in those that start inside."""
    if not HAS_SIGNAL_MASK:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def announce(line: str, interrupted: threading.Event) -> None:
    """Prints `line` once the server is up; then turns a Ctrl-C into the server's orderly end.

    Streamlit answers every signal alike and does not say which one it was. SIGINT is to be blocked
    in all threads, so that it waits for this one.
    """
    # Streamlit sets its handlers as soon as it listens.
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.05)
    typer.echo(line)
    if HAS_SIGNAL_MASK:
        signal.sigwait({signal.SIGINT})
        interrupted.set()
        os.kill(os.getpid(), signal.SIGTERM)


def warm_up() -> None:
    """Imports what the first page would wait for, while the server starts and waits itself."""
    from streamlit.elements import plotly_chart  # noqa: F401  # its module is what is wanted

    from nviz import shell  # noqa: F401
    from nviz.charts import base_figure

    base_figure(100).add_scatter(x=[0], y=[0]).to_json()


def colours() -> dict[str, Any]:
    """Streamlit's options for the colours of the charts."""
    from nviz.charts import DARK_PALETTE, PALETTE

    return {
        # Both sections are needed: with one theme Streamlit ignores the reader's choice.
        "theme_light_primaryColor": PALETTE[0],
        "theme_dark_primaryColor": DARK_PALETTE[0],
        "theme_chartCategoricalColors": list(PALETTE),
    }


@app.command()
def serve(
    runs: Runs,
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 8501,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="Ask every visitor for this (?token=...); a host that others can reach gets a new "
            "one if none is given",
        ),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="Alert rules in TOML; left out, a common set")
    ] = None,
) -> None:
    """Show the runs in a browser until Ctrl-C."""
    interrupted = threading.Event()
    # Before anything is imported that starts threads, which keep the mask that they start with.
    with sigint_waits():
        mirror = mirror_of(runs)
        asked_for = token_for(host, token)
        check_port(host, port)
        if rules is not None:
            _rules(rules)
        if mirror is not None:
            mirror.follow()
        os.environ[RUNS_VARIABLE] = str((mirror.root if mirror else Path(runs)).resolve())
        os.environ[URL_VARIABLE] = runs if mirror else ""
        os.environ[TOKEN_VARIABLE] = asked_for
        os.environ[RULES_VARIABLE] = str(rules.resolve()) if rules else ""
        from streamlit import config
        from streamlit.web import bootstrap

        options = STREAMLIT_OPTIONS | colours() | {"server_address": host, "server_port": port}
        bootstrap.load_config_options(options)
        config.set_option("logger.hideWelcomeMessage", True)
        # Only a token that was made here is shown: who gave one knows it.
        shown = address(host, port, "" if token else asked_for)
        line = f"nviz serves at {shown}"
        threading.Thread(target=announce, args=(line, interrupted), daemon=True).start()
        threading.Thread(target=warm_up, daemon=True).start()
        bootstrap.run(str(Path(__file__).parent / "app" / "main.py"), False, [], options)
    if interrupted.is_set():
        raise KeyboardInterrupt


@app.command()
def query(
    runs: Runs,
    sql: Annotated[str, typer.Argument(help="One SELECT over the views runs, metrics, events")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a head line")] = False,
    rows: Annotated[int, typer.Option(help="Most rows to print", min=1)] = 1_000_000,
    seconds: Annotated[float, typer.Option(help="Longest time for the statement", min=0.1)] = 60.0,
) -> None:
    """Answer read-only SQL. Names with a slash need double quotes: "loss/train"."""
    if as_json and as_csv:
        raise VizError("E-QUERY-FORMAT", "--json and --csv exclude each other", "give one of them")
    answer = _answer(folder_of(runs), sql, rows, seconds)
    if as_json:
        _print_json(answer.columns, answer.rows)
    elif as_csv:
        _print_csv(answer.columns, answer.rows)
    else:
        _print_table(answer.columns, answer.rows)
    if answer.truncated:
        typer.echo(f"warning only the first {rows:,} rows; give --rows for more", err=True)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="One run's folder, or a URL: s3://bucket/runs/run")],
    html: Annotated[Path, typer.Option("--html", help="File to write")],
) -> None:
    """Write one run as one HTML file that needs nothing else: to keep, or to send."""
    from nviz.export import write_html

    folder = _run_folder(run)
    size = write_html(folder, html)
    typer.echo(f"{html}, {size / 2**20:.1f} MiB")


@app.command()
def alert(
    runs: Runs,
    rules: Annotated[
        Path | None, typer.Option(help="Rules in TOML; left out, a common set")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Look once; exit code 1 if a rule is broken")
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks", min=1)] = 30.0,
    webhook: Annotated[str | None, typer.Option(help="POST each change there as JSON")] = None,
    write_events: Annotated[
        bool, typer.Option("--write-events", help="Also add a line to the run's events.jsonl")
    ] = False,
    state: Annotated[
        Path | None, typer.Option(help="File that remembers what was told, for repeated --once")
    ] = None,
) -> None:
    """Watch runs by rules and tell each alert once when it is raised, once when it is over."""
    mirror = mirror_of(runs)
    if mirror is not None and write_events:
        raise VizError(
            "E-REMOTE-WRITE",
            f"--write-events cannot write to {mirror.url}",
            "leave it out, or watch a local folder",
        )
    from nviz.alerts import Watch, Webhook

    logging.basicConfig(format="warning %(message)s", level=logging.WARNING)
    watch = Watch(
        folder_of(runs),
        _rules(rules),
        webhook=Webhook(webhook) if webhook else None,
        write_events=write_events,
        memory=state,
    )
    while True:
        for change in watch.look(time.time()):
            typer.echo(_told(change))
        if once:
            raise typer.Exit(1 if watch.raised else 0)
        time.sleep(every)
        _wait_for(mirror, every)


def _wait_for(mirror: "Mirror | None", every: float) -> None:
    """Brings the mirror up to date, however long its storage is away: old files say nothing new."""
    while mirror is not None:
        try:
            mirror.refresh()
            break
        except VizError as error:
            typer.echo(f"warning {error}", err=True)
            time.sleep(every)


def _run_folder(run: str) -> Path:
    """The folder of one run, or its mirror."""
    mirror = mirror_of(run)
    folder = folder_of(run)
    if mirror is not None and not (folder / "run.json").is_file():
        raise VizError("E-RUN-MISSING", f"{mirror.url} holds no run.json", "give one run's URL")
    return folder


def _rules(path: Path | None) -> "tuple[Rule, ...]":
    from nviz.alerts import DEFAULT_RULES, read_rules

    return read_rules(path) if path else DEFAULT_RULES


def _told(change: "Change") -> str:
    """A change on one line; what comes from a run cannot break it."""
    found = change.alert
    line = f"{change.state} {found.run} [{found.rule}] {found.what}"
    return _printable(line)


def _printable(line: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in line)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="New folder for the runs")],
    runs: Annotated[int, typer.Option(help="How many runs", min=1, max=10_000)] = 24,
    steps: Annotated[int, typer.Option(help="Steps of each run", min=1, max=1_000_000)] = 2000,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal numbers", min=0)] = 0,
) -> None:
    """Write seeded, realistic run folders to try the dashboard on. Interrupted, it goes on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from nviz.demo import Progress, write_demo

    last = Progress(runs, runs, 0)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = not sys.stderr.isatty()
    bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=silent)
    task = bar.add_task("runs", total=runs)

    def show(now: Progress) -> None:
        nonlocal last
        last = now
        # From the first run on: an error before it is one line alone.
        bar.start()
        bar.update(task, completed=now.done)

    try:
        write_demo(out, runs=runs, steps=steps, seed=seed, progress=show)
    finally:
        bar.stop()
    typer.echo(
        f"{runs} runs of {steps:,} steps in {out}, {last.size_bytes / 2**20:,.0f} MiB written"
    )
    typer.echo(f"look at them: nviz serve {out}")


def _answer(runs: Path, sql: str, rows: int, seconds: float) -> "Answer":
    from nviz.store.sql_worker import SqlWorker

    worker = SqlWorker(runs)
    try:
        reply = worker.query(sql, rows, seconds)
    finally:
        worker.close()
    for problem in reply.problems:
        typer.echo(f"warning {_printable(problem)}", err=True)
    return reply.answer


def _print_json(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    """Non-finite numbers are words, as in the run folder, since JSON has no others."""
    from nviz.store.parse import non_finite_word

    def plain(value: object) -> object:
        return (non_finite_word(value) or value) if isinstance(value, float) else value

    for row in rows:
        record = {name: plain(value) for name, value in zip(columns, row, strict=True)}
        typer.echo(json.dumps(record, default=str, ensure_ascii=False))


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    # Now, while main can still answer for a reader that is gone.
    sys.stdout.flush()


def _print_table(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nviz.formats import without_controls

    def cell(value: object) -> Text:
        return Text(without_controls(str(value)))

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(cell(name), overflow="fold")
    for row in rows:
        table.add_row(*(cell("" if value is None else value) for value in row))
    console = Console()
    with console.capture() as printed:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def main() -> None:
    """Runs the command line; a problem the user can mend is one line and exit code 2."""
    try:
        app()
    except VizError as error:
        typer.echo(f"error {_printable(str(error))}", err=True)
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
