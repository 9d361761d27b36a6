"""GPUs: readings over time, the newest ones, and the page that names hot and idle ranks."""

import math
import re
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from headless import Open, figures, open_page, rerun, texts, tiles, titles
from nviz.queries import gpus
from nviz.store.gpus import READINGS, gpu_files, open_gpus
from run_extras import write_gpus
from run_folder import START, RunFolder
from streamlit.testing.v1 import AppTest

__all__ = ["open_page"]


def opened(run: RunFolder) -> duckdb.DuckDBPyConnection:
    """The run's readings, all of them readable."""
    connection, problems = open_gpus(run.path)
    assert connection is not None and problems == []
    return connection


def noise(count: int, seed: int = 3) -> list[float]:
    """Readings of unit scale around 90, with one deep and one high value."""
    values = 90 + np.random.default_rng(seed).normal(size=count)
    values[count // 3], values[count // 2] = 1.0, 100.0
    return [float(value) for value in values]


def test_curves_keep_the_extremes_and_their_places(root: Path) -> None:
    values = noise(5000)
    write_gpus(run := RunFolder(root, "a"), {3: values})
    (found,) = gpus.readings(opened(run), "utilisation_percent", buckets=100)
    assert found.rank == 3 and len(found.value) <= 200
    times = START + 10.0 * np.arange(5000)
    assert (np.diff(found.time_unix_s) > 0).all()
    assert np.interp(found.time_unix_s, times, values) == pytest.approx(found.value)
    for extreme in (1.0, 100.0):
        place = found.time_unix_s[found.value == extreme].tolist()
        assert place == [times[values.index(extreme)]]


def test_the_map_holds_means_of_equal_times(root: Path) -> None:
    values = {rank: noise(400, seed=rank) for rank in (0, 5)}
    write_gpus(run := RunFolder(root, "a"), values)
    found = gpus.reading_map(opened(run), "utilisation_percent", columns=4)
    assert found.ranks == [0, 5] and found.value_RB.shape == (2, 4)
    for row, rank in enumerate(found.ranks):
        # 399 intervals in four columns: the last reading belongs to the last one.
        pieces = np.split(np.array(values[rank]), [100, 200, 300])
        assert found.value_RB[row] == pytest.approx([piece.mean() for piece in pieces])


def test_the_newest_reading_of_each_rank_and_its_recent_mean(root: Path) -> None:
    write_gpus(run := RunFolder(root, "a"), {0: [10.0] * 100 + [50.0] * 60 + [99.0], 1: [70.0]})
    first, second = gpus.latest(opened(run), list(READINGS))
    assert first.values["utilisation_percent"] == 99.0
    assert first.values["power_w"] == 600.0 and second.values["temperature_c"] == 61.0
    # The last 600 seconds: fifty-nine of 50 % and one of 99 %.
    assert first.recent_utilisation == pytest.approx((59 * 50 + 99) / 60)
    assert second.recent_utilisation is None


def test_parts_of_several_writers_are_read_together(root: Path) -> None:
    write_gpus(run := RunFolder(root, "a"), {0: [10.0]})
    (run.path / "gpu.parquet").rename(run.path / "gpu-0.parquet")
    write_gpus(run, {1: [20.0]}, power_w=None)
    (run.path / "gpu.parquet").rename(run.path / "gpu-1.parquet")
    ranks, names = gpus.span(opened(run))
    assert ranks == [0, 1] and "power_w" in names
    first, second = gpus.latest(opened(run), names)
    assert first.values["power_w"] == 600.0 and "power_w" not in second.values


def test_only_files_of_that_name_that_are_no_links_are_read(root: Path, tmp_path: Path) -> None:
    write_gpus(run := RunFolder(root, "a"), {0: [10.0]})
    (run.path / "gpu.parquet").rename(tmp_path / "secret.parquet")
    (run.path / "gpu.parquet").symlink_to(tmp_path / "secret.parquet")
    (run.path / "gpu-x.parquet").write_bytes(b"")
    assert gpu_files(run.path) == [] and open_gpus(run.path) == (None, [])


def test_the_page_names_hot_and_idle_ranks(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", device="NVIDIA H200")
    write_gpus(run, {0: [95.0] * 50, 1: [95.0] * 50, 9: [40.0] * 50}, temperature_c=88.0)
    app = open_page("gpus", run="a")
    assert "Hot: rank 0 (88 °C), 1 (88 °C), 9 (88 °C)." in texts(app)
    assert "Least used: rank 9, 40 % over the last ten minutes" in texts(app)
    assert tiles(app)["GPUs"] == "3" and tiles(app)["Hottest"] == "88 °C"
    assert tiles(app)["Power, all"] == "1.81k W" and tiles(app)["Fullest memory"] == "71 %"
    assert {"Utilisation", "Memory", "Power", "Temperature", "SM clock"} <= set(titles(app))
    assert [line["name"] for line in figures(app)[0]["data"]] == ["rank 0", "rank 1", "rank 9"]
    assert app.dataframe[0].value["utilisation_percent"].tolist() == [95.0, 95.0, 40.0]


def test_many_ranks_are_a_heat_map_and_cool_ones_are_not_named(root: Path, open_page: Open) -> None:
    write_gpus(RunFolder(root, "a"), {rank: [90.0] * 30 for rank in range(200)}, temperature_c=60.0)
    app = open_page("gpus", run="a")
    assert all(chart["data"][0]["type"] == "heatmap" for chart in figures(app))
    assert len(figures(app)[0]["data"][0]["y"]) == 200
    assert "Hot:" not in texts(app) and "Least used" not in texts(app)


def test_values_that_are_missing_or_not_finite_leave_gaps(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a")
    write_gpus(run, {0: [math.nan, 50.0, math.inf, 60.0]}, power_w=None, temperature_c=None)
    app = open_page("gpus", run="a")
    assert figures(app)[0]["data"][0]["y"] == [50.0, 60.0]
    assert tiles(app)["Hottest"] == "–" and tiles(app)["Power, all"] == "–"
    assert "Temperature" not in titles(app)


def test_readings_that_stopped_while_the_run_goes_on_are_said(
    root: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nviz.store.workspace.INDEX_S", 0.0)
    write_gpus(run := RunFolder(root, "a"), {0: [90.0]}, time_unix_s=time.time() - 400)
    assert re.search(r"No new reading for 6 min \d\d s", texts(open_page("gpus", run="a")))
    run.save(status="completed")
    assert "No new reading" not in texts(open_page("gpus", run="a"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "cpu (2 threads)"}, "trains on the CPU"),
        ({"device": "NVIDIA H200"}, "No reading yet"),
        ({"device": "NVIDIA H200", "status": "completed"}, "recorded no GPU readings"),
    ],
)
def test_a_run_without_readings_says_why(
    root: Path, open_page: Open, fields: dict[str, str], words: str
) -> None:
    RunFolder(root, "a", **fields)
    app = open_page("gpus", run="a")
    assert words in texts(app) and not figures(app)


@pytest.mark.parametrize("content", [b"", b"PAR1 torn"])
def test_a_torn_file_is_said_and_read_once_it_is_whole(
    root: Path, open_page: Open, content: bytes
) -> None:
    run = RunFolder(root, "a")
    (run.path / "gpu.parquet").write_bytes(content)
    app = open_page("gpus", run="a")
    assert "cannot be read" in texts(app)
    write_gpus(run, {0: [90.0]})
    assert tiles(rerun(app))["GPUs"] == "1"


def test_odd_columns_break_nothing(root: Path, open_page: Open) -> None:
    run = RunFolder(root, "a", device="NVIDIA H200")
    odd = {"rank": ["0", "x"], "time_unix_s": ["1790000000", "y"], "power_w": ["600", "much"]}
    pq.write_table(pa.table(odd), run.path / "gpu.parquet")
    assert tiles(open_page("gpus", run="a"))["GPUs"] == "1"
    pq.write_table(pa.table({"host": ["a"]}), run.path / "gpu.parquet")
    assert "no columns rank and time_unix_s" in texts(open_page("gpus", run="a"))
    pq.write_table(pa.table({"rank": [], "time_unix_s": []}), run.path / "gpu.parquet")
    assert "No reading yet" in texts(open_page("gpus", run="a"))


def downloads(app: AppTest) -> set[str]:
    """Keys of a page's download buttons."""
    return {str(item.proto.id).rsplit("-", 1)[-1] for item in app.get("download_button")}


@pytest.mark.parametrize("ranks", [2, 12])
def test_each_chart_has_its_values_as_a_download(root: Path, open_page: Open, ranks: int) -> None:
    write_gpus(run := RunFolder(root, "a"), {rank: noise(50, rank) for rank in range(ranks)})
    keys = downloads(open_page("gpus", run="a"))
    assert {"csv gpu Utilisation", "csv gpu Temperature", "csv gpus"} <= keys
    name = "utilisation_percent"
    table = gpus.readings_arrow(gpus.readings(opened(run), name), name)
    assert table.column_names == ["rank", "time_unix_s", name]
    assert table.num_rows == 50 * ranks
    assert table.to_pylist()[50]["rank"] == 1
    assert table[name].to_pylist()[:50] == noise(50, 0)
    found = gpus.reading_map(opened(run), name)
    means = gpus.map_arrow(found, name)
    assert means.num_rows == np.isfinite(found.value_RB).sum()
    last = means.to_pylist()[-1]
    assert last == {
        "rank": ranks - 1,
        "time_unix_s": found.time_unix_s_B[-1],
        name: found.value_RB[-1, -1],
    }
