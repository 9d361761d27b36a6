"""The console script: answers, errors on one line with exit code 2, and a quick --help."""

import csv
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import free_port
from nviz import __version__
from nviz.cli import is_loopback, main, token_for
from run_folder import RunFolder, record


@dataclass
class Ended:
    """What a command printed, and the code it ended with."""

    returncode: int
    stdout: str
    stderr: str


Nviz = Callable[..., Ended]


@pytest.fixture
def nviz(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nviz:
    """Runs the program's entry in this process, which saves seconds of imports a test."""
    monkeypatch.delenv("NVIZ_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["nviz", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return run


def started(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """The program as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "nviz", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


@pytest.fixture
def runs(root: Path) -> Path:
    """A root with one run of two steps, the second one's loss not a number."""
    run = RunFolder(root, "a", name="first, of all")
    run.append(record(0, loss=1.5), record(1, loss=math.nan))
    return root


QUERY = 'SELECT r.name, step, "loss/train" AS loss FROM metrics JOIN runs r USING (run) ORDER BY 2'


def test_a_query_prints_a_table_json_lines_or_csv(runs: Path, nviz: Nviz) -> None:
    # SELECT r.name: `step` is in both views, so it is ambiguous unless qualified.
    query = QUERY.replace(" step,", " metrics.step,")
    table = nviz("query", str(runs), query)
    assert table.returncode == 0, table.stderr
    assert "first, of all" in table.stdout and "nan" in table.stdout
    lines = nviz("query", str(runs), query, "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"name": "first, of all", "step": 0, "loss": 1.5},
        {"name": "first, of all", "step": 1, "loss": "NaN"},
    ]
    text = nviz("query", str(runs), query, "--csv").stdout
    assert list(csv.reader(io.StringIO(text)))[:2] == [
        ["name", "step", "loss"],
        ["first, of all", "0", "1.5"],
    ]


def test_the_last_line_of_a_table_is_its_last_row(runs: Path, nviz: Nviz) -> None:
    answer = nviz("query", str(runs), "select count(*) from runs")
    assert answer.stdout.splitlines()[-1] == "1"


def test_rows_beyond_the_limit_are_cut_and_said_to_be(runs: Path, nviz: Nviz) -> None:
    answer = nviz("query", str(runs), "FROM range(9)", "--rows", "3", "--csv")
    assert answer.stdout.splitlines()[1:] == ["0", "1", "2"]
    assert "only the first 3 rows" in answer.stderr


def test_a_demo_is_written_counted_exported_and_watched(tmp_path: Path, nviz: Nviz) -> None:
    out = tmp_path / "demo"
    made = nviz("demo", "--out", str(out), "--runs", "5", "--steps", "40", "--seed", "2")
    assert made.returncode == 0 and "5 runs of 40 steps" in made.stdout
    assert nviz("query", str(out), "select count(*) from runs").stdout.split()[-1] == "5"
    page = tmp_path / "run.html"
    exported = nviz("export", str(out / "quickstart-0001"), "--html", str(page))
    assert exported.returncode == 0 and page.stat().st_size > 1e6
    state = tmp_path / "state.json"
    first = nviz("alert", str(out), "--once", "--state", str(state))
    assert first.returncode in (0, 1)
    again = nviz("alert", str(out), "--once", "--state", str(state))
    assert again.returncode == first.returncode and again.stdout == ""


def test_an_alert_is_a_line_and_exit_code_one(runs: Path, nviz: Nviz) -> None:
    found = nviz("alert", str(runs), "--once")
    assert found.returncode == 1
    assert found.stdout.startswith("raised a [loss not finite] 1 loss not finite lately")


def test_an_empty_root_can_be_asked(root: Path, nviz: Nviz) -> None:
    answer = nviz("query", str(root), "SELECT count(*) AS n FROM runs", "--csv")
    assert answer.stdout == "n\n0\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["query", "MISSING", "SELECT 1"], "E-RUNS-MISSING"),
        (["query", "ROOT", "DROP TABLE runs"], "E-SQL-READ-ONLY"),
        (["query", "ROOT", "SELECT nothing"], "E-SQL"),
        (["query", "ROOT", "SELECT 1", "--json", "--csv"], "E-QUERY-FORMAT"),
        (["serve", "MISSING"], "E-RUNS-MISSING"),
        (["serve", "ROOT", "--rules", "MISSING"], "E-ALERT-RULES"),
        (["alert", "MISSING"], "E-RUNS-MISSING"),
        (["alert", "ROOT", "--webhook", "file:///etc/passwd"], "E-WEBHOOK"),
        (["export", "MISSING", "--html", "x.html"], "E-RUNS-MISSING"),
        (["demo", "--out", "OCCUPIED"], "E-DEMO-OUT"),
    ],
)
def test_errors_start_with_a_code_and_exit_with_two(
    root: Path, nviz: Nviz, arguments: list[str], code: str
) -> None:
    (root.parent / "notes.txt").write_text("mine")
    paths = {"MISSING": str(root / "no"), "ROOT": str(root), "OCCUPIED": str(root.parent)}
    result = nviz(*[paths.get(argument, argument) for argument in arguments])
    assert result.returncode == 2
    assert result.stderr.startswith(f"error {code}: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_port_in_use_is_one_clear_error(root: Path, nviz: Nviz) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = nviz("serve", str(root), "--port", str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert result.stderr.startswith("error E-PORT: ")
    assert result.stderr.endswith("choose another --port\n")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_one_clear_error(
    root: Path, nviz: Nviz, host: str
) -> None:
    result = nviz("serve", str(root), "--host", host)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error E-PORT: ") and host in result.stderr
    assert result.stderr.endswith("to --host\n") and len(result.stderr.splitlines()) == 1


def test_what_a_run_holds_does_not_command_the_terminal(root: Path, nviz: Nviz) -> None:
    RunFolder(root, "a", name="\x1b[31mred\x07 \u202eback")
    name = "SELECT name, 'two\nlines' AS lines FROM runs"
    table = nviz("query", str(root), name).stdout
    assert "\ufffd[31mred\ufffd \ufffdback" in table
    assert [line.split()[-1] for line in table.splitlines()] == ["lines", "two", "lines"]
    raw = nviz("query", str(root), name, "--json").stdout
    assert json.loads(raw)["name"] == "\x1b[31mred\x07 \u202eback"
    refused = nviz("query", f"{root}/no\x1b[31m", "SELECT 1").stderr
    assert refused.startswith("error E-RUNS-MISSING: ") and "no?[31m is" in refused


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    assert token_for(host, None) == ""
    assert token_for(host, "asked for") == "asked for"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", "localhost.evil"])
def test_any_other_host_gets_a_token_that_nobody_can_guess(host: str) -> None:
    made = {token_for(host, missing) for missing in (None, "") for _ in range(20)}
    assert len(made) == 40 and all(len(token) >= 32 for token in made)
    assert token_for(host, "secret") == "secret"


def test_a_token_that_was_made_is_in_the_address_that_is_shown(root: Path) -> None:
    process = started("serve", str(root), "--host", "0.0.0.0", "--port", str(free_port()))
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    # No browser elsewhere opens 0.0.0.0: the machine's name is shown.
    name = re.escape(socket.gethostname())
    assert re.fullmatch(rf"nviz serves at http://{name}:\d+/\?token=[\w-]{{32}}\n", line)


def test_the_version_is_one_line(nviz: Nviz) -> None:
    assert nviz("--version") == Ended(0, f"{__version__}\n", "")


def test_ctrl_c_during_a_query_is_one_line_and_130(runs: Path, nviz: Nviz) -> None:
    # Whoever started the tests may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    late = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    late.start()
    ended = nviz("query", str(runs), "SELECT count(*) FROM range(1000000000000) WHERE random() > 2")
    assert not late.is_alive()
    assert ended == Ended(130, "", "interrupted\n")


@pytest.mark.parametrize("early", [True, False])
def test_ctrl_c_while_serving_is_one_line_and_130(runs: Path, early: bool) -> None:
    port = free_port()
    process = started("serve", str(runs), "--port", str(port))
    assert process.stdout is not None
    if early:
        wait_until_blocked(process.pid)
    else:
        assert process.stdout.readline() == f"nviz serves at http://127.0.0.1:{port}\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("interrupted\n", 130)


def wait_until_blocked(pid: int) -> None:
    """Waits until the process blocks SIGINT, which it does before the server starts."""
    mask = 0
    while not mask & 1 << (signal.SIGINT - 1):
        found = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert found
        mask = int(found[1], 16)
        time.sleep(0.01)


def test_a_reader_that_leaves_is_no_error_to_speak_of(runs: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = started("query", str(runs), "SELECT 1", "--csv", stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


def test_help_and_errors_do_not_load_streamlit_or_duckdb() -> None:
    program = (
        "import sys; sys.argv = ['nviz', '--help']\n"
        "from nviz.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'streamlit', 'duckdb', 'plotly', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_package_never_imports_the_trainer_or_torch() -> None:
    program = (
        "import sys, pkgutil, nviz, importlib\n"
        "for item in pkgutil.walk_packages(nviz.__path__, 'nviz.'):\n"
        "    if not item.name.startswith('nviz.pages.') and item.name not in "
        "('nviz.app.main', 'nviz.__main__'):\n"
        "        importlib.import_module(item.name)\n"
        "bad = {'torch', 'nmoe_train', 'nmoe_kernels', 'nmoe_data'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
