"""`nviz serve RUNS` shows run folders in a browser; `nviz query RUNS SQL` asks them by SQL."""

import csv
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nviz import __version__
from nviz.errors import VizError
from nviz.variables import RUNS_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from nviz.store.database import Answer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
Runs = Annotated[Path, typer.Argument(help="Folder that holds runs, or one run's folder")]

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


def check_host(host: str, token: str | None) -> None:
    """Raises VizError `E-HOST-TOKEN` if others could reach the dashboard without a token."""
    if not is_loopback(host) and not token:
        raise VizError(
            "E-HOST-TOKEN",
            f"{host} can be reached from other machines, and no token is set",
            f"give --token or {TOKEN_VARIABLE}, or leave --host out",
        )


def check_port(host: str, port: int) -> None:
    """Raises VizError `E-PORT` if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise VizError(
            "E-PORT", f"cannot listen on {host}:{port} ({error.strerror})", "choose another --port"
        ) from error


def check_folder(runs: Path) -> None:
    """Raises VizError `E-RUNS-MISSING` if `runs` is no readable folder."""
    if not runs.is_dir() or not os.access(runs, os.R_OK | os.X_OK):
        raise VizError(
            "E-RUNS-MISSING",
            f"{runs} is not a folder that can be read",
            "give the folder that holds the runs, or one run's folder",
        )


def address(host: str, port: int) -> str:
    """The dashboard's address for a browser."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


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
            help="Ask every visitor for this (?token=...); needed for a host that others can reach",
        ),
    ] = None,
) -> None:
    """Show the runs in a browser until Ctrl-C."""
    check_folder(runs)
    check_host(host, token)
    check_port(host, port)
    os.environ[RUNS_VARIABLE] = str(runs.resolve())
    os.environ[TOKEN_VARIABLE] = token or ""
    if HAS_SIGNAL_MASK:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from streamlit import config
    from streamlit.web import bootstrap

    options = STREAMLIT_OPTIONS | colours() | {"server_address": host, "server_port": port}
    bootstrap.load_config_options(options)
    config.set_option("logger.hideWelcomeMessage", True)
    line, interrupted = f"nviz serves at {address(host, port)}", threading.Event()
    threading.Thread(target=announce, args=(line, interrupted), daemon=True).start()
    bootstrap.run(str(Path(__file__).parent / "app" / "main.py"), False, [], options)
    if interrupted.is_set():
        raise KeyboardInterrupt


@app.command()
def query(
    runs: Runs,
    sql: Annotated[str, typer.Argument(help="One SELECT over the views runs, metrics, events")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a head line")] = False,
) -> None:
    """Answer read-only SQL. Names with a slash need double quotes: "loss/train"."""
    check_folder(runs)
    if as_json and as_csv:
        raise VizError("E-QUERY-FORMAT", "--json and --csv exclude each other", "give one of them")
    answer = _answer(runs, sql)
    if as_json:
        _print_json(answer.columns, answer.rows)
    elif as_csv:
        _print_csv(answer.columns, answer.rows)
    else:
        _print_table(answer.columns, answer.rows)


def _answer(runs: Path, sql: str) -> "Answer":
    from nviz.store.database import Database
    from nviz.store.runs import RunIndex

    needs_metrics = any(name in sql.lower() for name in ("metrics", "events"))
    try:
        database = Database(RunIndex(runs).refresh().values(), metrics=needs_metrics)
    except RuntimeError as error:
        # So DuckDB names a Ctrl-C that came while it worked.
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from error
    # In another thread, as a long statement in the main one keeps Python from seeing Ctrl-C.
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(database.query, sql)
        try:
            return answer.result()
        except KeyboardInterrupt:
            database.interrupt()
            raise


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

    table = Table()
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    Console().print(table)


def main() -> None:
    """Runs the command line; a problem the user can mend is one line and exit code 2."""
    try:
        app()
    except VizError as error:
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
