"""The page HYDRA over folders that nmoe-data really wrote, in good states and bad ones."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import nviz
import pyarrow.parquet as pq
import pytest
from hydra_folders import write_hydra_folders
from judge_server import hidden_scores
from nmoe_data.hydra.heads import open_heads
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
    folder = tmp_path_factory.mktemp("hydra")
    write_hydra_folders(folder, lines_of(folder))
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


def test_dragged_thresholds_move_the_lines_and_say_what_they_keep(
    full: Path, open_page: Open
) -> None:
    app = open_page(folder="corpus/heads")
    own = metrics(app)
    moved = open_page(folder="corpus/heads", thresholds=["0.25", "0.85"])
    drawn = json.loads(moved.get("plotly_chart")[0].proto.spec)
    assert [shape["x0"] for shape in drawn["layout"]["shapes"]] == [0.25, 0.85]
    # The curve of the fixture: at threshold t a share 1 - t is kept, of precision t.
    assert metrics(moved)["Kept"] == "15.0 %" and metrics(moved)["Dropped"] == "25.0 %"
    assert metrics(moved)["Band, to the judge"] == "60.0 %"
    assert metrics(moved)["Precision of the kept"] == "0.85 [0.85, 0.85]"
    assert metrics(moved)["Recall of the kept"] == "–"
    assert own["Kept"] != "15.0 %"
    for made_up in (["x", "y"], ["-1", "7"], ["0.9", "0.1"], ["0.5"]):
        assert metrics(open_page(folder="corpus/heads", thresholds=made_up))["Kept"]


def test_acceptance_is_read_between_its_points_and_unknown_outside() -> None:
    curve = [
        {"threshold": at / 4, "share": [1 - at / 4, 0.9 - at / 4, 1.0], "precision": [at / 8]}
        for at in range(1, 4)
    ]
    found = hydra.acceptance({"curve": curve})
    assert found is not None
    assert found.at("share kept", 0.375) == pytest.approx((0.625, 0.525, 1.0))
    assert found.at("precision", 0.5)[0] == 0.25
    for unknown in (*found.at("precision", 0.1), *found.at("recall", 0.5)):
        assert unknown != unknown


def test_dragged_thresholds_count_the_documents_of_a_corpus(full: Path, open_page: Open) -> None:
    folder = full / "corpus" / "filtered"
    quality = [
        value
        for path in (folder / "scores").glob("*.parquet")
        for value in pq.read_table(path, columns=["quality"])["quality"].to_pylist()
    ]
    found = hydra.band_counts(folder, 0.45, 0.6)
    assert found == {
        "drop": sum(value < 0.45 for value in quality),
        "band": sum(0.45 <= value < 0.6 for value in quality),
        "keep": sum(value >= 0.6 for value in quality),
    }
    app = open_page(folder="corpus/filtered", thresholds=["0.45", "0.6"])
    assert f"{found['drop']} dropped, {found['band']} in the band" in words(app)


def test_predicted_scores_are_those_of_the_parts(full: Path, open_page: Open) -> None:
    folder = full / "corpus" / "filtered"
    rows = [
        scores
        for path in (folder / "scores").glob("*.parquet")
        for scores in pq.read_table(path, columns=["scores"])["scores"].to_pylist()
    ]
    found = hydra.predicted_scores(folder, ["helpfulness"])
    assert found.dimensions == ["helpfulness", *(f"dimension {at}" for at in range(2, 6))]
    for at in range(5):
        values = np.clip(np.round([scores[at] for scores in rows if scores]), 0, 5)
        assert found.count_DS[at].tolist() == [int((values == score).sum()) for score in range(6)]
    assert "Scores" in titles(open_page(folder="corpus/filtered"))


def test_examples_follow_the_thresholds_and_the_chosen_band(full: Path, open_page: Open) -> None:
    content = json.loads((full / "corpus" / "report" / "report.json").read_text())
    quality = [entry["quality"] for entry in content["examples"]]
    low, high = 0.4, 0.52
    keep = sum(value >= high for value in quality)
    assert 0 < keep < len(quality)
    address = {"folder": "corpus/report", "thresholds": ["0.4", "0.52"]}
    app = open_page(**address, band="keep")
    assert [item.label.split("\\:")[0] for item in app.expander] == ["keep"] * keep
    dropped = sum(value < low for value in quality)
    assert f"{dropped} drop, {len(quality) - keep - dropped} band, {keep} keep" in words(app)
    none = open_page(folder="corpus/report", thresholds=["0", "1"], band="keep")
    assert not none.expander and "No example lies in this band" in words(none)


def test_each_chart_has_its_values_as_a_download(full: Path, open_page: Open) -> None:
    wanted = {
        "labels": {"csv scores"},
        "heads": {"csv acceptance"},
        "filtered": {"csv quality", "csv predicted scores"},
        "report": {"csv agreement", "csv acceptance"},
    }
    for name, keys in wanted.items():
        buttons = open_page(folder=f"corpus/{name}").get("download_button")
        assert {str(item.proto.id).rsplit("-", 1)[-1] for item in buttons} == keys
    scores = hydra.score_counts(full / "corpus" / "labels")
    rows = hydra.scores_arrow(scores).to_pylist()
    assert [row["count"] for row in rows] == scores.count_DS.ravel().tolist()
    assert rows[-1]["dimension"] == scores.dimensions[-1] and rows[-1]["score"] == 5
    quality = hydra.quality_counts(full / "corpus" / "filtered")
    found = hydra.quality_arrow(quality)
    assert sum(found["documents"].to_pylist()) == sum(c.sum() for c in quality.count_B.values())
    assert found["to"].to_pylist()[: hydra.BINS][-1] == 1.0
    report = json.loads((full / "corpus" / "report" / "report.json").read_text())
    marks = hydra.acceptance(report["acceptance"])
    assert marks is not None
    curve = hydra.acceptance_arrow(marks)
    assert curve["precision low"].to_pylist() == marks.bounds["precision"][0]
    agreed = hydra.agreements(report)
    table = hydra.agreements_arrow(agreed)
    assert table.num_rows == sum(len(item.numbers) for item in agreed) > 0
    assert hydra.agreements_arrow([]).num_rows == 0
    assert hydra.quality_arrow(hydra.Quality(quality.edge_B1, {})).num_rows == 0


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
