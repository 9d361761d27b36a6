"""Each page run headless over real run folders, in good states and bad ones."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nviz
import pytest
from run_folder import RunFolder, record, trained
from streamlit.testing.v1 import AppTest

APP = Path(nviz.__file__).parent / "app" / "main.py"
PAGES = Path(nviz.__file__).parent / "pages"
Open = Callable[..., AppTest]


@pytest.fixture
def open_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a page over `root` with an address' parameters."""
    monkeypatch.setenv("NVIZ_RUNS", str(root))
    monkeypatch.setenv("NVIZ_TOKEN", "")

    def opened(page: str, **parameters: str) -> AppTest:
        app = AppTest.from_file(str(APP), default_timeout=60)
        for name, value in parameters.items():
            app.query_params[name] = value
        app.run()
        if page != "runs":
            app.switch_page(f"../pages/{page}.py")
            for name, value in parameters.items():
                app.query_params[name] = value
            app.run()
        assert not app.exception, [item.message for item in app.exception]
        return app

    return opened


def texts(app: AppTest) -> str:
    """All prose of a page."""
    kinds = (app.title, app.subheader, app.caption, app.markdown, app.info, app.warning)
    more = (app.error, app.success, app.code, app.text)
    return "\n".join(str(item.value) for kind in (*kinds, *more) for item in kind)


def titles(app: AppTest) -> list[str]:
    """Section titles of a page."""
    return [item.value[6:] for item in app.markdown if item.value.startswith("##### ")]


def charts(app: AppTest) -> int:
    """How many charts a page shows."""
    return len(app.get("plotly_chart"))


def test_an_empty_root_says_what_to_run(open_page: Open) -> None:
    for page in ("runs", "run", "router", "configuration"):
        app = open_page(page)
        assert "No runs here yet" in texts(app)
        assert any("nmoe-train quickstart" in item.value for item in app.code)


def test_the_list_shows_every_run_in_every_state(root: Path, open_page: Open) -> None:
    trained(root, "good", steps=120, name="good one", status="completed")
    RunFolder(root, "fresh")
    RunFolder(root, "group/dead", status="failed")
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text('{"schema')
    app = open_page("runs")
    frame = app.dataframe[0].value
    assert sorted(frame["run"]) == ["broken", "fresh", "good one", "group/dead"]
    line = frame[frame["run"] == "good one"].iloc[0]
    assert line["status"] == "✓ completed"
    assert (line["step"], line["progress"]) == (119, pytest.approx(100 * 119 / 120))
    assert line["loss"] == record(119)["loss/train"]
    assert len(line["curve"]) > 20
    assert "no whole JSON" in texts(app)


def test_the_list_can_be_searched_from_the_address(root: Path, open_page: Open) -> None:
    RunFolder(root, "a", tags=["sweep"])
    RunFolder(root, "b", status="failed")
    assert list(open_page("runs", q="SWEEP").dataframe[0].value["run"]) == ["a"]
    assert list(open_page("runs", q="failed").dataframe[0].value["run"]) == ["b"]
    nothing = open_page("runs", q="zzz")
    assert not nothing.dataframe and "No run matches" in texts(nothing)


def test_a_run_shows_its_values_and_curves(root: Path, open_page: Open) -> None:
    trained(root, "a", steps=120, name="my run", results={"loss/unigram": 5.0})
    app = open_page("run", run="a")
    assert app.title[0].value == "my run"
    values = {item.label: item.value for item in app.metric}
    assert values["Step"] == "119 / 120"
    assert values["Training loss"] == f"{record(119)['loss/train']:.3f}"
    expected = {"Loss", "Tokens per second", "Gradient norm", "Learning rates", "Step time"}
    assert expected <= set(titles(app))
    assert charts(app) == 7
    assert "non-finite" not in texts(app)


def loss_lines(app: AppTest) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of the lines of the first chart, by name."""
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    return {line["name"]: (line["x"], line["y"]) for line in figure["data"]}


def test_evaluations_are_marks_and_the_unigram_loss_is_a_line(root: Path, open_page: Open) -> None:
    results = {"loss/validation": 2.25, "loss/unigram": 6.5}
    run = RunFolder(root, "a", status="completed", results=results)
    run.append(record(1), record(2, loss__validation=3.5), *map(record, range(3, 7)))
    run.event("eval", 2, **{"loss/validation": 3.5})
    run.event("eval", 4, **{"loss/validation": 2.75})
    run.event("eval", 6, **{"loss/validation": 2.25})
    app = open_page("run", run="a")
    lines = loss_lines(app)
    assert lines["validation"] == ([2, 4, 6], [3.5, 2.75, 2.25])
    assert lines["unigram baseline"] == ([1, 6], [6.5, 6.5])
    assert {item.label: item.value for item in app.metric}["Validation loss"] == "2.250"
    tokens = loss_lines(open_page("run", run="a", x="Tokens"))["validation"][0]
    assert tokens == [record(step)["tokens"] for step in (2, 4, 6)]


def test_an_evaluation_that_only_an_event_holds_is_shown(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    run.append(*map(record, range(1, 4)))
    run.event("eval", 9, **{"loss/validation": 2.5})
    app = open_page("run", run="a")
    assert loss_lines(app)["validation"] == ([9], [2.5])
    assert {item.label: item.value for item in app.metric}["Validation loss"] == "2.500"


def test_loss_terms_say_that_they_are_unscaled(root: Path, open_page: Open) -> None:
    RunFolder(root, "a").append(record(0), record(1))
    app = open_page("run", run="a")
    assert "before their coefficients" in texts(app)
    names = "".join(chart.proto.spec for chart in app.get("plotly_chart"))
    assert "balance, unscaled" in names and "z-loss, unscaled" in names


def test_dropped_tokens_are_a_panel_only_where_they_are_recorded(
    root: Path, open_page: Open
) -> None:
    RunFolder(root, "a").append(record(0), record(1))
    RunFolder(root, "b").append(*[record(step, router__dropped=None) for step in range(2)])
    assert "Dropped tokens" in titles(open_page("router", run="a"))
    without = titles(open_page("router", run="b"))
    assert "Router entropy" in without and "Dropped tokens" not in without


def test_nan_and_infinity_are_counted_with_their_steps(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1, loss=math.nan), record(2, loss=math.inf), record(3))
    text = texts(open_page("run", run="a"))
    assert "2 non-finite values" in text
    assert "training NaN at step 1, training Infinity at step 2" in text


def test_a_run_of_only_nan_still_draws(root: Path, open_page: Open) -> None:
    RunFolder(root, "a").append(*[record(step, loss=math.nan) for step in range(5)])
    app = open_page("run", run="a", log="true", smooth="0.9")
    assert "5 non-finite values" in texts(app)
    assert {item.label: item.value for item in app.metric}["Training loss"] == "NaN"


@pytest.mark.parametrize(
    ("status", "words"), [("running", "No step yet"), ("failed", "ended before its first step")]
)
def test_a_run_without_steps_says_so(root: Path, open_page: Open, status: str, words: str) -> None:
    run = RunFolder(root, "a", status=status)
    shutil.rmtree(run.path / "metrics")
    app = open_page("run", run="a")
    assert words in texts(app)
    assert charts(app) == 0
    assert "no expert loads" in texts(open_page("router", run="a")).lower()


def test_an_unreadable_run_shows_why_and_its_curves(root: Path, open_page: Open) -> None:
    run = trained(root, "a", steps=20)
    (run.path / "run.json").write_text("{")
    app = open_page("run", run="a")
    assert "no whole JSON" in texts(app)
    assert charts(app) > 0


@pytest.mark.parametrize("key", ["gone", "../../etc", "/etc", "a/../a", "."])
def test_an_address_without_a_run_is_answered_and_reaches_no_path(
    root: Path, open_page: Open, key: str
) -> None:
    RunFolder(root, "a")
    for page in ("run", "router", "configuration"):
        app = open_page(page, run=key)
        assert "There is no run" in texts(app)
        assert charts(app) == 0


def test_a_run_that_vanishes_while_it_is_shown(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nviz.store.workspace.INDEX_S", 0.0)
    run = trained(root, "a", steps=20)
    RunFolder(root, "b")
    app = open_page("run", run="a")
    shutil.rmtree(run.path)
    app.run()
    assert not app.exception
    assert "There is no run" in texts(app)


def test_a_root_that_vanishes_while_it_is_served_is_said(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nviz.store.workspace.INDEX_S", 0.0)
    trained(root, "a", steps=20)
    for page in ("runs", "run"):
        app = open_page(page)
        moved = root.rename(root.with_name("moved"))
        app.run()
        assert not app.exception
        assert "is gone" in texts(app) and "No runs here yet" not in texts(app)
        moved.rename(root)
        app.run()
        assert "is gone" not in texts(app)
        assert app.dataframe or charts(app)


def test_axis_and_earlier_attempts_come_from_the_address(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", attempt=2)
    run.append(*[record(step) for step in range(20)])
    run.append(*[record(step) for step in range(10, 15)], attempt=2)
    app = open_page("run", run="a", x="Tokens", earlier="true")
    chart = app.get("plotly_chart")[0].proto.spec
    assert "attempt 1" in chart and '"tokens"' in chart
    assert "attempt 1" not in open_page("run", run="a").get("plotly_chart")[0].proto.spec


def test_the_router_page_names_dead_experts(root: Path, open_page: Open) -> None:
    trained(root, "a", steps=200)
    app = open_page("router", run="a", layer="2")
    assert "1 dead: no token in the last 50 recorded steps (layer 2, expert 5)" in texts(app)
    assert "Layer 2: experts over steps" in titles(app)
    assert charts(app) == 7
    healthy = open_page("router", run="a", layer="not a layer")
    assert "Layer 1: experts over steps" in titles(healthy)


def test_the_configuration_is_flat_and_searchable(root: Path, open_page: Open) -> None:
    RunFolder(root, "a", config={"model": {"width": 256, "<b>": "x"}, "seed": 1})
    app = open_page("configuration", run="a")
    assert list(app.dataframe[0].value["setting"]) == ["model.<b>", "model.width", "seed"]
    assert "5f1d9c0a7be34412" in list(app.dataframe[1].value["value"])
    found = open_page("configuration", run="a", find="width 256")
    assert list(found.dataframe[0].value["setting"]) == ["model.width"]


def test_sql_answers_and_refuses(root: Path, open_page: Open) -> None:
    trained(root, "a", steps=20)
    app = open_page("sql", sql="SELECT count(*) AS n FROM metrics")
    assert app.dataframe[0].value["n"].tolist() == [20]
    for bad in ("DROP TABLE metrics", "SELECT nonsense", "FROM read_text('/etc/hostname')"):
        refused = open_page("sql", sql=bad)
        assert not refused.dataframe
        assert "refused" in texts(refused)


def test_hostile_names_stay_text(root: Path, open_page: Open) -> None:
    evil = "<script>alert(1)</script> [x](javascript:alert(1)) **b** :red[r]"
    RunFolder(root, "a", name=evil, tags=[evil], device=evil, hosts=[evil], group=evil).append(
        record(0)
    )
    for page in ("runs", "run", "router", "configuration"):
        app = open_page(page, run="a")
        # What is left once every escaped sign is taken out could act as markup.
        text = re.sub(r"\\.", "", texts(app))
        for markup in ("<", "](", "**", ":red["):
            assert markup not in text


def test_a_long_name_does_not_push_the_page_down(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", name="begins " + "long " * 90 + "ends", tags=["tag " * 99])
    run.append(record(0), record(1))
    app = open_page("run", run="a")
    title = app.title[0].value
    assert title.startswith("begins long") and title.endswith("ends") and len(title) <= 100
    assert all(len(item.value) < 600 for item in app.caption)


def test_a_token_is_asked_for_and_compared(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(root, "secret-run", steps=10)
    monkeypatch.setenv("NVIZ_TOKEN", "ünlock")
    for given in ({}, {"token": "wrong"}, {"token": ""}):
        app = AppTest.from_file(str(APP), default_timeout=60)
        for name, value in given.items():
            app.query_params[name] = value
        app.run()
        assert not app.exception and not app.dataframe
        assert [item.label for item in app.text_input] == ["Token"]
        assert "secret-run" not in texts(app)
    app.text_input[0].set_value("wrong too").run()
    assert not app.dataframe and "not the right one" in texts(app)
    app.text_input[0].set_value("ünlock").run()
    assert list(app.dataframe[0].value["run"]) == ["secret-run"]
    assert open_page("run", run="secret-run", token="ünlock").title[0].value == r"secret\-run"


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("[!_]*.py")))
def test_a_page_that_is_run_without_the_script_asks_for_the_token_too(
    root: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    trained(root, "secret-run", steps=10)
    monkeypatch.setenv("NVIZ_RUNS", str(root))
    monkeypatch.setenv("NVIZ_TOKEN", "unlock")
    app = AppTest.from_file(str(PAGES / f"{page}.py"), default_timeout=60).run()
    assert not app.exception and not app.dataframe and not charts(app)
    assert "Token" in [item.label for item in app.text_input]
    assert "secret" not in texts(app)


def test_streamlit_finds_no_pages_folder_beside_its_script() -> None:
    assert not (APP.parent / "pages").exists()


def test_a_missing_root_is_one_clear_line(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIZ_RUNS", "/nowhere/at/all")
    assert "E\\-RUNS\\-MISSING" in texts(open_page("runs"))
