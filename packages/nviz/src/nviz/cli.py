"""`nviz serve RUNS` shows run folders in a browser; `nviz query RUNS SQL` asks them by SQL."""

import csv
import json
import os
import socket
import sys
import threading
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from nviz import __version__
from nviz.errors import VizError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Dashboard and SQL over training runs. Reads run folders while trainers write them.",
)

Runs = Annotated[Path, typer.Argument(help="Folder that holds runs, or one run's folder")]

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
    # Both sections are needed: with one theme Streamlit ignores the reader's light or dark choice.
    "theme_light_primaryColor": "#1F77B4",
    "theme_dark_primaryColor": "#56B4E9",
    "theme_headingFontSizes": ["2rem", "1.6rem", "1.4rem", "1.2rem", "1.05rem", "1rem"],
    "theme_metricValueFontSize": "1.45rem",
    "theme_paddingTop": "1rem",
    "theme_paddingBottom": "2rem",
    "theme_chartCategoricalColors": [
        "#0072B2",
        "#E69F00",
        "#009E73",
        "#CC79A7",
        "#56B4E9",
        "#D55E00",
        "#F0E442",
        "#999999",
    ],
}


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False,
) -> None:
    """Options of the program itself."""
    if version:
        typer.echo(f"nviz {__version__}")
        raise typer.Exit()


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
            "give --token or NVIZ_TOKEN, or leave --host out",
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


def announce(host: str, port: int) -> None:
    """Print the address once the server answers."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    for _ in range(600):
        try:
            socket.create_connection((reachable, port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
            continue
        typer.echo(f"nviz serves at {address(host, port)}")
        return


@app.command()
def serve(
    runs: Runs,
    port: Annotated[int, typer.Option(help="Port to listen on", min=1, max=65535)] = 8501,
    host: Annotated[str, typer.Option(help="Address to listen on")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="NVIZ_TOKEN",
            help="Ask every visitor for this (?token=...); needed for a host that others can reach",
        ),
    ] = None,
) -> None:
    """Show the runs in a browser until Ctrl-C."""
    check_folder(runs)
    check_host(host, token)
    check_port(host, port)
    os.environ["NVIZ_RUNS"] = str(runs.resolve())
    os.environ["NVIZ_TOKEN"] = token or ""
    from streamlit import config
    from streamlit.web import bootstrap

    options = STREAMLIT_OPTIONS | {"server_address": host, "server_port": port}
    bootstrap.load_config_options(options)
    config.set_option("logger.hideWelcomeMessage", True)
    threading.Thread(target=announce, args=(host, port), daemon=True).start()
    bootstrap.run(str(Path(__file__).parent / "app" / "main.py"), False, [], options)


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
    from nviz.store.database import Database
    from nviz.store.runs import RunIndex

    needs_metrics = any(name in sql.lower() for name in ("metrics", "events"))
    database = Database(RunIndex(runs).refresh().values(), metrics=needs_metrics)
    answer = database.query(sql)
    if as_json:
        _print_json(answer.columns, answer.rows)
    elif as_csv:
        _print_csv(answer.columns, answer.rows)
    else:
        _print_table(answer.columns, answer.rows)


def _print_json(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    """Non-finite numbers are words, as in the run folder, since JSON has no others."""
    for row in rows:
        record = {name: _plain(value) for name, value in zip(columns, row, strict=True)}
        typer.echo(json.dumps(record, default=str, ensure_ascii=False))


def _plain(value: object) -> object:
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return words.get(repr(value), value) if isinstance(value, float) else value


def _print_csv(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


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
    """Entry of the console script: errors are one line and exit code 2, Ctrl-C is 130."""
    try:
        app()
    except VizError as error:
        typer.echo(f"error {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
