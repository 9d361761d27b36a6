"""Alert rules: how they are read, when they hold, and that each is told once."""

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headless import Open, open_page, texts
from nviz.alerts import DEFAULT_RULES, Rule, Watch, Webhook, read_rules, write_event
from nviz.errors import VizError
from nviz.store.events import EventLog
from run_folder import RunFolder, record

__all__ = ["open_page"]


def watch(root: Path, *rules: Rule, **more: object) -> Watch:
    """A watch over `root` that tells nobody unless `more` says so."""
    settings = {"webhook": None, "write_events": False, "memory": None} | more
    return Watch(root, rules or DEFAULT_RULES, **settings)  # type: ignore[arg-type]  # by name


def told(changes: Iterable[Any]) -> list[tuple[str, str, str]]:
    """State, run and rule of each change."""
    return [(c.state, c.alert.run, c.alert.rule) for c in changes]


def heat(run: RunFolder, *degrees: float) -> None:
    """GPU readings, one rank a value, after a hot one that is over."""
    ranks = list(range(len(degrees)))
    table = pa.table(
        {
            "rank": ranks * 2,
            "time_unix_s": [1.0] * len(ranks) + [2.0] * len(ranks),
            "temperature_c": [99.0] * len(ranks) + list(degrees),
        }
    )
    pq.write_table(table, run.path / "gpu.parquet")


def test_rules_are_read_with_their_limits_and_names(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        '[[rule]]\nkind = "imbalance"\nabove = 3\nname = "crowded"\nmatch = "moonlet"\n'
        '[[rule]]\nkind = "no_step"\nminutes = 2.5\n[[rule]]\nkind = "loss_not_finite"\n'
    )
    assert read_rules(path) == (
        Rule("imbalance", "crowded", 3.0, "moonlet"),
        Rule("no_step", "no step", 2.5),
        Rule("loss_not_finite", "loss not finite"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no list of"),
        ("[[rule", "cannot be read"),
        ('[[rule]]\nkind = "nonsense"', "nonsense"),
        ('[[rule]]\nkind = "imbalance"', "needs above, a number"),
        ('[[rule]]\nkind = "imbalance"\nabove = true', "needs above, a number"),
        ('[[rule]]\nkind = "no_step"\nminutes = -1', "needs minutes, a number"),
        ('[[rule]]\nkind = "failed"\nabove = 3', "'above'"),
        ('[[rule]]\nkind = "failed"\nname = 3', "no text"),
        ('[[rule]]\nkind = "failed"\n[[rule]]\nkind = "failed"', "two rules"),
        ('rule = ["x"]', "None"),
        ('[[rule]]\nkind = ["failed"]', "['failed']"),
        ('[[rule]]\nkind = "no_step"\nminutes = nan', "needs minutes, a number"),
    ],
)
def test_a_wrong_rule_is_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(VizError, match="E-ALERT-RULES") as caught:
        read_rules(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_each_rule_is_broken_by_its_own_trouble_alone(root: Path) -> None:
    RunFolder(root, "fine").append(record(0), record(1))
    RunFolder(root, "nan").append(record(0), record(1, loss=math.nan), record(2))
    RunFolder(root, "crowded").append(record(0, router__load_imbalance=5.5))
    RunFolder(root, "failed", status="failed", ended_unix_s=time.time()).append(record(0))
    hot = RunFolder(root, "hot")
    hot.append(record(0))
    heat(hot, 60.0, 91.0)
    cool = RunFolder(root, "cool")
    cool.append(record(0))
    heat(cool, 60.0, 84.0)
    looked = watch(root)
    assert told(looked.look(time.time())) == [
        ("raised", "crowded", "imbalance"),
        ("raised", "failed", "failed"),
        ("raised", "hot", "GPU hot"),
        ("raised", "nan", "loss not finite"),
    ]
    what = {run: alert.what for (run, _), alert in looked.raised.items()}
    assert what["hot"] == "GPU of rank 1 at 91 °C, above 85 °C"
    assert what["nan"] == "1 loss not finite lately, the last at step 1"
    later = watch(root).look(time.time() + 11 * 60)
    silent = {run for state, run, rule in told(later) if rule == "no step"}
    assert silent == {"fine", "nan", "crowded", "hot", "cool"}, "not the one that has ended"


def test_a_run_of_long_ago_and_one_that_no_rule_matches_break_none(root: Path) -> None:
    RunFolder(root, "old", status="failed", ended_unix_s=time.time() - 2 * 86_400)
    RunFolder(root, "new", status="failed", ended_unix_s=time.time(), tags=["big"])
    assert told(watch(root).look(time.time())) == [("raised", "new", "failed")]
    assert watch(root, Rule("failed", "failed", match="small")).look(time.time()) == []


def test_an_alert_is_told_once_and_once_that_it_is_over(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, router__load_imbalance=9.0))
    looked = watch(root, write_events=True)
    states = []
    for imbalance in (9.0, 9.0, 1.0, 1.0, 9.0):
        run.append(record(len(states) + 1, router__load_imbalance=imbalance))
        states.append([state for state, *_ in told(looked.look(time.time()))])
    assert states == [["raised"], [], ["over"], [], ["raised"]]
    log = EventLog(run.path)
    log.refresh()
    found = [(event.event, event.detail["state"], event.detail["rule"]) for event in log.events]
    assert found == [("alert", state, "imbalance") for state in ("raised", "over", "raised")]


def test_without_the_option_nothing_is_written_into_a_run(root: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, loss=math.nan))
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert watch(root).look(time.time())
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_the_state_file_keeps_a_second_watch_from_repeating(root: Path, tmp_path: Path) -> None:
    run, state = RunFolder(root, "a"), tmp_path / "state.json"
    run.append(record(0, loss=math.nan))
    assert len(watch(root, memory=state).look(time.time())) == 1
    again = watch(root, memory=state)
    assert again.look(time.time()) == [] and again.raised
    state.write_text("{")
    with pytest.raises(VizError, match="E-ALERT-STATE"):
        watch(root, memory=state)


def test_an_event_is_a_line_of_its_own_after_a_torn_one(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    path = run.path / "events.jsonl"
    path.write_text('{"event": "start"}\n{"event": "che')
    write_event(run.path, {"event": "alert"})
    assert path.read_text().splitlines() == [
        '{"event": "start"}', '{"event": "che', '{"event": "alert"}'
    ]  # fmt: skip
    write_event(tmp_path / "gone", {"event": "alert"})
    assert not (tmp_path / "gone").exists()
    secret = tmp_path / "secret"
    secret.write_text("x")
    path.unlink()
    path.symlink_to(secret)
    write_event(run.path, {"event": "alert"})
    assert secret.read_text() == "x", "a link could lead anywhere"


NONSENSE = 0


class Receiver:
    """A webhook's other side: answers with the given codes, then 200; keeps what it got."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.got: list[tuple[str, dict[str, object]]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.headers["Idempotency-Key"], json.loads(body)))
                code = receiver.codes.pop(0) if receiver.codes else 200
                if code == NONSENSE:
                    self.wfile.write(b"nonsense\r\n\r\n")
                    return
                self.send_response(code)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Keeps silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?key=secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A server on the loopback."""
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.mark.parametrize(
    ("codes", "calls", "problem"),
    [
        ([], 1, None),
        ([503, 429], 3, None),
        ([500, 500, 500], 3, "127.0.0.1 answered 500"),
        ([403], 1, "127.0.0.1 answered 403"),
        ([NONSENSE], 2, None),
    ],
)
def test_a_call_is_repeated_where_that_may_help(
    receiver: Receiver, codes: list[int], calls: int, problem: str | None
) -> None:
    receiver.codes = list(codes)
    waits: list[float] = []
    found = Webhook(receiver.url, sleep=waits.append).send({"a": 1}, "one")
    assert (found, len(receiver.got)) == (problem, calls)
    assert waits == [1.0, 2.0][: calls - 1]
    assert {key for key, _ in receiver.got} == {"one"}


def test_news_that_could_not_be_sent_are_sent_in_the_next_look_in_order(
    root: Path, receiver: Receiver
) -> None:
    run = RunFolder(root, "a")
    run.append(record(0, router__load_imbalance=9.0))
    looked = watch(root, webhook=Webhook(receiver.url, sleep=lambda _: None))
    receiver.codes = [500, 500, 500]
    looked.look(time.time())
    run.append(record(1, router__load_imbalance=1.0))
    looked.look(time.time())
    looked.look(time.time())
    sent = [content["state"] for _, content in receiver.got]
    assert sent == ["raised"] * 4 + ["over"]
    assert receiver.got[-1][1]["run"] == "a" and len({key for key, _ in receiver.got}) == 2


def test_news_that_could_not_be_sent_outlive_the_watch_in_its_state_file(
    root: Path, tmp_path: Path, receiver: Receiver
) -> None:
    run, state = RunFolder(root, "a"), tmp_path / "state.json"
    run.append(record(0, router__load_imbalance=9.0))
    receiver.codes = [500, 500, 500]
    for _ in range(3):
        hook = Webhook(receiver.url, sleep=lambda _: None)
        watch(root, webhook=hook, memory=state).look(time.time())
    assert [content["state"] for _, content in receiver.got] == ["raised"] * 4
    assert len({key for key, _ in receiver.got}) == 1, "a receiver can tell a repeat"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://x",
        "hook",
        "http://",
        "http://[::1",
        "http://x:port/",
        "http://x/a b",
    ],
)
def test_only_http_addresses_are_webhooks(url: str) -> None:
    with pytest.raises(VizError, match="E-WEBHOOK"):
        Webhook(url)


def test_pages_show_the_alerts_of_the_servers_rules(
    root: Path, open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder(root, "a").append(record(0, router__load_imbalance=2.0), record(1, loss=math.nan))
    # Its last loss is fine.
    RunFolder(root, "b").append(*[record(i, loss=math.nan if i == 7 else None) for i in range(90)])
    for run in ("a", "b"):
        frame = open_page("runs", q=run).dataframe[0].value
        assert list(frame["alerts"][0]) == ["loss not finite"]
    words = texts(open_page("run", run="a")).replace("**", "")
    assert "loss not finite: 1 loss not finite lately" in words
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nkind = "imbalance"\nabove = 1.5\nname = "crowded"\n')
    monkeypatch.setenv("NVIZ_RULES", str(rules))
    assert list(open_page("runs", q="a").dataframe[0].value["alerts"][0]) == ["crowded"]
