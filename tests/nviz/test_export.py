"""One run as one HTML file: whole, escaped, and asking nothing of anyone."""

import json
import re
from pathlib import Path

import pytest
from headless import EVIL
from nviz.errors import VizError
from nviz.export import POLICY, write_html
from plotly.offline import get_plotlyjs
from run_folder import RunFolder, record, trained


def specs(text: str) -> list[dict[str, object]]:
    """The figures in an exported file."""
    return [json.loads(found) for found in re.findall(r"<script>\{const f=(.*?);Plotly\.", text)]


def without_library(text: str) -> str:
    """The file without the chart library, which names addresses that it never asks."""
    library = get_plotlyjs()
    assert text.count(library) == 1, "the library is there once"
    return text.replace(library, "")


def test_a_run_is_one_file_with_curves_router_events_and_settings(
    root: Path, tmp_path: Path
) -> None:
    run = trained(root, "a", steps=120, name="my run", results={"loss/unigram": 5.0})
    out = tmp_path / "run.html"
    assert write_html(run.path, out) == out.stat().st_size
    text = out.read_text()
    rest = without_library(text)
    assert POLICY in rest and not re.search(r"(src|href)\s*=|https?://|@import|url\(", rest)
    titles = re.findall(r"<h2>(.*?)</h2>", rest)
    assert titles[0] == "Loss" and "Layers by experts, step 119" in titles
    assert sum(title.startswith("Layer ") for title in titles) == 3
    assert len(specs(rest)) == len(titles)
    assert "2 events" in rest and "model.experts_per_token" in rest
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.html"]


def test_nothing_from_a_run_is_markup_or_ends_a_script(root: Path, tmp_path: Path) -> None:
    evil = f"</script>{EVIL}"
    run = RunFolder(
        root, "a", name=evil, tags=[evil], device=evil, hosts=[evil], config={evil: {"x": evil}}
    )
    run.append(record(0), record(1))
    run.event(evil, 1, what=evil)
    out = tmp_path / "run.html"
    write_html(run.path, out)
    rest = without_library(out.read_text())
    assert "alert(1)" in rest, "it is shown"
    assert "<script>alert" not in rest
    assert rest.count("<script>") == rest.count("</script>") == len(specs(rest)) + 1


def test_values_that_are_not_finite_are_counted(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    run.append(record(0), record(1, loss=float("nan")), record(2))
    out = tmp_path / "run.html"
    write_html(run.path, out)
    assert "1 non-finite values" in out.read_text()


def test_a_run_without_steps_says_so(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    write_html(RunFolder(root, "a").path, out)
    assert "recorded no step" in out.read_text()


def test_what_cannot_be_read_or_written_is_one_clear_line(root: Path, tmp_path: Path) -> None:
    for folder in (root / "gone", root):
        with pytest.raises(VizError, match="E-RUN-MISSING"):
            write_html(folder, tmp_path / "x.html")
    run = RunFolder(root, "a")
    with pytest.raises(VizError, match="E-EXPORT-OUT"):
        write_html(run.path, tmp_path / "no" / "x.html")
    (run.path / "run.json").write_text("{")
    with pytest.raises(VizError, match="E-RUN-MISSING"):
        write_html(run.path, tmp_path / "x.html")


def test_a_run_that_vanishes_meanwhile_is_one_clear_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(root, "a")
    monkeypatch.setattr("nviz.export.Workspace.runs", lambda _: {})
    with pytest.raises(VizError, match=r"^E-RUN-MISSING: .* any more"):
        write_html(run.path, tmp_path / "run.html")


def test_a_folder_with_nothing_but_run_json_is_a_file(root: Path, tmp_path: Path) -> None:
    run = RunFolder(root, "a")
    (run.path / "metrics").rmdir()
    write_html(run.path, tmp_path / "run.html")
    assert "recorded no step" in (tmp_path / "run.html").read_text()
