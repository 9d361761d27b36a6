"""The page HYDRA over folders that nmoe-data really wrote, in good states and bad ones."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nmoe_data.hydra.filter.run as filter_run
import nviz
import pytest
from hydra_heads import make_heads
from hydra_labels import write_label_folder
from inline_executor import InlineExecutor
from judge_server import hidden_scores
from nmoe_data.hydra.calibrate import CurvePoint
from nmoe_data.hydra.filter import FilterSettings, filter_corpus
from nmoe_data.hydra.heads import open_heads, save_heads
from nmoe_data.hydra.report import make_report
from nviz.queries import hydra
from nviz.store.hydra import HydraIndex
from streamlit.testing.v1 import AppTest

APP = Path(nviz.__file__).parent / "app" / "main.py"
Open = Callable[..., AppTest]
ATTACK = '<script>alert("x")</script> **bold** $x$ '


def lines_of(folder: Path) -> list[str]:
    """Real text, half of it beginning with markup that must stay text."""
    text = (Path(os.__file__).parent / "argparse.py").read_text()
    pieces = [text[start : start + 500] for start in range(0, 60_000, 500)]
    return [ATTACK * (n % 2) + f"{n} {piece}" for n, piece in enumerate(pieces)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labels, heads, a filtered corpus and a report."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("hydra")
    texts = lines_of(folder)
    write_label_folder(folder / "labels", texts, {"judge": hidden_scores})
    heads = make_heads(folder / "heads", texts)
    assert heads.calibration is not None
    points = tuple(
        CurvePoint(at / 10, (1 - at / 10,) * 3, (at / 10,) * 3, (float("nan"),) * 3)
        for at in range(11)
    )
    save_heads(
        folder / "heads", replace(heads, calibration=replace(heads.calibration, curve=points))
    )
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filter_run, "ProcessExecutor", InlineExecutor)
        filter_corpus(str(source), folder / "heads", folder / "filtered", FilterSettings())
    make_report(folder / "heads", folder / "labels", folder / "report")
    return folder


@pytest.fixture
def full(root: Path, written: Path) -> Path:
    """The runs' root with all four folders two levels below it."""
    shutil.copytree(written, root / "corpus", dirs_exist_ok=True)
    return root


@pytest.fixture
def open_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the page over `root` with an address' parameters."""
    monkeypatch.setenv("NVIZ_RUNS", str(root))
    monkeypatch.setenv("NVIZ_TOKEN", "")

    def opened(**parameters: str) -> AppTest:
        app = AppTest.from_file(str(APP), default_timeout=60)
        app.run()
        app.switch_page("../pages/hydra.py")
        for name, value in parameters.items():
            app.query_params[name] = value
        app.run()
        assert not app.exception, [item.message for item in app.exception]
        return app

    return opened


def titles(app: AppTest) -> list[str]:
    return [item.value[6:] for item in app.markdown if item.value.startswith("##### ")]


def words(app: AppTest) -> str:
    kinds = (app.title, app.subheader, app.caption, app.markdown, app.info, app.warning, app.error)
    return "\n".join(str(item.value) for kind in (*kinds, app.code, app.success) for item in kind)


def metrics(app: AppTest) -> dict[str, str]:
    return {item.label: item.value for item in app.metric}


def test_a_root_without_folders_says_how_to_begin(open_page: Open) -> None:
    app = open_page()
    assert "Nothing of HYDRA here yet" in words(app)
    assert "nmoe-data hydra label" in words(app)
    assert not app.get("plotly_chart")


def test_labels_show_scores_and_states(full: Path, open_page: Open) -> None:
    app = open_page(folder="corpus/labels")
    assert titles(app) == ["Scores", "Status"]
    assert metrics(app)["Labels"] == metrics(app)["Scored"] == "120"
    states = app.dataframe[0].value
    assert states.values.tolist() == [["judge", "scored", "", 120]]
    assert len(app.get("plotly_chart")) == 1


def test_score_counts_are_those_of_the_rule(full: Path) -> None:
    found = hydra.score_counts(full / "corpus" / "labels")
    assert found.dimensions[0] == "helpfulness" and len(found.dimensions) == 5
    given = [hidden_scores(text) for text in lines_of(full)]
    for at in range(5):
        expected = [sum(scores[at] == score for scores in given) for score in range(6)]
        assert found.count_DS[at].tolist() == expected


def test_heads_show_thresholds_on_the_acceptance_curve(full: Path, open_page: Open) -> None:
    app = open_page(folder="corpus/heads")
    assert metrics(app)["Encoder"] == "hashed" and metrics(app)["Judge head"] == "mlp"
    (chart,) = app.get("plotly_chart")
    calibration = open_heads(full / "corpus" / "heads").calibration
    assert calibration is not None
    drawn = json.loads(chart.proto.spec)
    lines = [shape["x0"] for shape in drawn["layout"]["shapes"]]
    assert lines == pytest.approx([calibration.tau_drop, calibration.tau_keep])
    assert [trace["name"] for trace in drawn["data"]] == ["share kept", "precision", "recall"]


def test_a_filtered_corpus_shows_its_quality_and_what_was_dropped(
    full: Path, open_page: Open
) -> None:
    app = open_page(folder="corpus/filtered")
    summary = json.loads((full / "corpus" / "filtered" / "filter.json").read_text())
    assert metrics(app)["Documents"] == "120" and metrics(app)["State"] == "finished"
    assert metrics(app)["Kept"] == str(summary["counts"]["kept"])
    found = hydra.quality_counts(full / "corpus" / "filtered")
    assert {name: int(count.sum()) for name, count in found.count_B.items()} == {
        "keep": summary["counts"]["kept"],
        "drop": 120 - summary["counts"]["kept"],
    }
    dropped = (full / "corpus" / "filtered" / "dropped.jsonl").read_text().splitlines()
    # Streamlit leaves out a line break at either end.
    assert [item.value.strip("\n") for item in app.code] == [
        json.loads(line)["text"].strip("\n") for line in dropped[:50]
    ]


def test_a_report_shows_agreement_and_examples_by_band(full: Path, open_page: Open) -> None:
    app = open_page(folder="corpus/report")
    assert titles(app) == ["Agreement", "Acceptance", "Examples"]
    content = json.loads((full / "corpus" / "report" / "report.json").read_text())
    table = app.dataframe[0].value
    assert len(table) == len(content["agreement"]) == 12
    first = content["agreement"][0]["spearman"]
    said = table["Spearman"][0]
    assert float(said.split(" ")[0]) == pytest.approx(first["value"], abs=0.006)
    assert said.endswith("]") and "[" in said
    assert content["verdict"]["verdict"] in words(app).replace("\\", "")
    assert len(app.get("plotly_chart")) == 2
    bands = [item.label.split("\\:")[0] for item in app.expander]
    assert bands == sorted(bands, key=["drop", "band", "keep"].index) and len(set(bands)) >= 2


def test_text_of_documents_stays_text(full: Path, open_page: Open) -> None:
    app = open_page(folder="corpus/report")
    assert any(ATTACK.strip() in item.value for item in app.code)
    assert ATTACK.strip() not in "\n".join(str(item.value) for item in app.markdown)


def test_an_unfinished_corpus_and_missing_tables_are_said(full: Path, open_page: Open) -> None:
    folder = full / "corpus" / "filtered"
    shutil.rmtree(folder / "scores")
    summary = json.loads((folder / "filter.json").read_text())
    (folder / "filter.json").write_text(json.dumps({**summary, "state": {"unit": 0}}))
    app = open_page(folder="corpus/filtered")
    assert metrics(app)["State"] == "unfinished" and "No part is whole yet" in words(app)
    (full / "corpus" / "labels" / "labels.parquet").write_bytes(b"torn")
    assert "No labels yet" in words(open_page(folder="corpus/labels"))


ODD = [
    b"{",
    b"[]",
    b"{}",
    b'{"schema_version": 2}',
    b'{"schema_version": 1}',
    b'{"schema_version": 1, "counts": 3, "agreement": [7, {"spearman": []}], "verdict": 5,'
    b'"calibration": {"curve": [1, {"share": 2}]}, "examples": {"a": 1}, "acceptance": [],'
    b'"encoder": 4, "documents": [], "judge": "x", "heads": 1, "usage": "much", "state": null}',
]


@pytest.mark.parametrize("kind", ["label", "head", "filter", "report"])
@pytest.mark.parametrize("content", ODD)
def test_odd_files_break_nothing(root: Path, open_page: Open, kind: str, content: bytes) -> None:
    (root / "odd").mkdir()
    (root / "odd" / f"{kind}.json").write_bytes(content)
    open_page(folder="odd")


def test_an_unknown_folder_is_said_and_reaches_nothing(full: Path, open_page: Open) -> None:
    app = open_page(folder="../../etc")
    assert "There is no folder" in words(app)


def test_folders_are_found_three_levels_down_and_not_through_links_outwards(
    root: Path, written: Path
) -> None:
    shutil.copytree(written / "heads", root / "a" / "b" / "heads")
    shutil.copytree(written / "heads", root / "a" / "b" / "c" / "too-deep")
    (root / "link").symlink_to(written)
    index = HydraIndex(root)
    assert list(index.refresh()) == ["a/b/heads"]
    assert list(HydraIndex(written / "report").refresh()) == ["report"]
    head = root / "a" / "b" / "heads" / "head.json"
    assert index.refresh()["a/b/heads"].problem is None
    head.write_text("{}")
    assert "schema_version None" in str(index.refresh()["a/b/heads"].problem)
