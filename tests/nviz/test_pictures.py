"""Every page in a real Chromium: drawn whole, in light and dark, with a picture; by keyboard; live.

The pictures lie in pytest's temporary folder, as `<page>-<scheme>.png`: look at them after a change
(`--basetemp` says where).
"""

import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from browser import browser, chromium, page, start_dashboard, stop_dashboard, watch
from hydra_folders import write_hydra_folders
from nmoe_data.prep import prep
from PIL import Image
from playwright.sync_api import Page, expect
from real_text import stdlib_pieces
from run_extras import write_checkpoint, write_gpus
from run_folder import START, RunFolder, record, trained

__all__ = ["browser", "page", "watch"]

pytestmark = pytest.mark.browser

# A page's address, words that it must show, charts and tables that it must draw.
PAGES = {
    "runs": ("/", "Runs", 0, 1),
    "run": ("/run?run=full", "whole run", 7, 1),
    "compare": ("/compare", "Curves of several runs", 1, 0),
    "router": ("/router?run=full", "Layers by experts", 4, 0),
    "performance": ("/performance?run=full", "Slow: rank 2", 8, 1),
    "gpus": ("/gpus?run=full", "Hot: rank 0", 6, 1),
    "gpus-many": ("/gpus?run=wide", "Newest readings", 6, 1),
    "faults": ("/faults?run=full", "Steps lost are those", 1, 2),
    "checkpoints": ("/checkpoints?run=full", "Damaged", 1, 3),
    "experiments": ("/experiments?runs=full&runs=wide&runs=live", "What differs", 0, 2),
    "data": ("/data?run=full&document=7", "Document lengths", 2, 1),
    "hydra-labels": ("/hydra?folder=corpus/labels", "Status", 1, 1),
    "hydra-heads": ("/hydra?folder=corpus/heads", "Precision of the kept", 1, 0),
    "hydra-filter": ("/hydra?folder=corpus/filtered", "in the band for the judge", 2, 1),
    "hydra-report": ("/hydra?folder=corpus/report", "Agreement", 2, 1),
    "configuration": ("/configuration?run=full", "Equal fingerprints", 0, 3),
    "sql": ("/sql", "rows", 0, 1),
    "empty-gpus": ("/gpus?run=live", "trains on the CPU", 0, 0),
}
CLIPPED = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
  const frame = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .legendtext')]
    .filter(text => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < frame.left - 2 || box.right > frame.right + 2
        || box.top < frame.top - 2 || box.bottom > frame.bottom + 2);
    })
    .map(text => text.textContent);
})"""


@dataclass
class Served:
    """A running dashboard, a run that it shows while it grows, and where pictures go."""

    address: str
    live: RunFolder
    pictures: Path


def write_runs(root: Path) -> RunFolder:
    """A run with everything, one of many ranks, a live one; corpora of the judge and of tokens."""
    full = trained(root, "full", steps=160, name="whole run", status="completed", attempt=2,
                   device="NVIDIA H200", tags=["baseline"])  # fmt: skip
    begun = ((1, START, 0), (2, START + 90, 150))
    names = ("attempt", "started_unix_s", "from_step")
    full.save(attempts=[dict(zip(names, values, strict=True)) for values in begun])
    stages = {"time_ms__dispatch": 60.0, "time_ms__expert": 110.0, "time_ms__combine": 40.0}
    for rank in range(1, 4):
        slow = 1.2 if rank == 2 else 1.0
        full.seal(*[record(step, step_ms=600.0 * slow, **stages) for step in range(160)], rank=rank)
    rows = [record(step, overlap_ratio=0.7 + 0.001 * (step % 9), **stages) for step in range(160)]
    full.seal(*rows[:80])
    saved = {"checkpoint__stall_ms": 41.0, "checkpoint__commit_ms": 900.0}
    full.append(*[record(step, time_unix_s=START + 90 + step / 2, overlap_ratio=0.7,
                         **stages, **(saved if step % 5 == 1 else {}))
                  for step in range(151, 180)], attempt=2)  # fmt: skip
    full.event("fault", 160, what="rank 3 on node-00 did not answer for 30 s", rank=3)
    full.event("recovery", 150, seconds=12.5, steps_lost=10)
    full.event("resume", 150)
    write_gpus(full, {r: [95.0 - r + (n % 3) for n in range(90)] for r in range(3)})
    hot = {r: [92.0 + (n % 5) for n in range(90)] for r in range(4)}
    write_gpus(full, hot, temperature_c=89.0)
    for step in (100, 150):
        write_checkpoint(full, step, ranks=4)
    write_checkpoint(full, 179, ranks=4)
    (full.path / "checkpoints" / "step-00000179" / "rank-00002.safetensors").write_bytes(b"cut")
    config = {"model": {"layers": 12, "experts": 64}, "seed": 3}
    wide = trained(root, "wide", steps=40, name="many ranks", status="failed", config=config)
    write_gpus(wide, {r: [90.0 + (r * n) % 7 for n in range(60)] for r in range(64)})
    live = trained(root, "live", steps=40, name="live run")
    # It stays running, however long the tests before its own take.
    live.save(updated_unix_s=time.time() + 3600)
    pieces = list(stdlib_pieces()[:150])
    source = root / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in pieces))
    prep(source, full.path / "data", tokenizer="bytes", held_out=0.05, shard_tokens=60_000)
    write_hydra_folders(root / "corpus", pieces)
    return live


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One dashboard for all tests of this module."""
    chromium()
    root = tmp_path_factory.mktemp("runs")
    live = write_runs(root)
    process, address = start_dashboard(root)
    yield Served(address, live, tmp_path_factory.mktemp("pictures"))
    assert stop_dashboard(process).strip() in ("", "Stopping..."), "no warnings, no tracebacks"


def settle(page: Page, charts: int, tables: int) -> None:
    """Waits until the page's charts and tables are drawn and nothing is being computed."""
    page.wait_for_function(
        "([charts, tables]) => "
        "document.querySelectorAll('.js-plotly-plot .main-svg').length >= charts "
        "&& document.querySelectorAll('[data-testid=stDataFrame] canvas').length >= tables "
        "&& !document.querySelector('[data-testid=stStatusWidget]') "
        "&& !document.querySelector('[data-testid=stSkeleton]')",
        arg=[charts, tables],
    )


def take_picture(page: Page, path: Path) -> np.ndarray:
    """A picture of the whole page; its pixels as grey levels."""
    high = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
    page.set_viewport_size({"width": 1280, "height": min(max(720, high + 80), 3000)})
    # The charts and tables follow the size.
    page.wait_for_timeout(300)
    picture = page.screenshot(path=str(path))
    page.set_viewport_size({"width": 1280, "height": 720})
    return np.asarray(Image.open(io.BytesIO(picture)).convert("L"), dtype=np.float64)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_drawn_whole_in_light_and_dark(page: Page, served: Served, name: str) -> None:
    address, words, charts, tables = PAGES[name]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(served.address + address)
        expect(page.get_by_text(words).first).to_be_visible()
        settle(page, charts, tables)
        levels = take_picture(page, served.pictures / f"{name}-{scheme}.png")
        assert (levels.mean() > 128) == (scheme == "light")
        assert levels.std() > 8, "the picture is not blank"
        assert page.evaluate(CLIPPED) == []
        wide = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
        assert wide <= 1280
    assert page.get_by_test_id("stException").count() == 0


def test_a_page_is_reached_and_changed_by_keyboard(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/performance?run=full")
    settle(page, 8, 1)
    seen = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "[document.activeElement.tagName, document.activeElement.innerText"
                " || document.activeElement.ariaLabel || '',"
                " document.activeElement.getBoundingClientRect().top]"
            )
        )
        if "Run" in str(seen[-1][1]) and seen[-1][0] == "INPUT":
            break
    names = [str(item[1]).split("\n")[-1] for item in seen]
    assert names.index("Runs") < names.index("Router") < names.index("SQL") < len(names) - 1, names
    page.keyboard.press("ArrowDown")
    page.keyboard.type("many")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"run=wide"))
    expect(page.get_by_text("wide · rank 0 of 1")).to_be_visible()


def test_the_thresholds_move_by_keyboard_and_stay_in_the_address(
    page: Page, served: Served
) -> None:
    page.goto(f"{served.address}/hydra?folder=corpus/heads")
    settle(page, 1, 0)
    kept = page.get_by_test_id("stMetric").filter(has_text="Kept").first
    before = kept.inner_text()
    page.get_by_role("slider").last.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(kept).not_to_have_text(before)
    expect(page).to_have_url(re.compile(r"thresholds="))


def test_a_live_page_grows_without_being_reloaded(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/faults?run=live")
    settle(page, 1, 2)
    page.evaluate("window.sameDocument = true")
    faults = page.get_by_test_id("stMetric").filter(has_text="Faults")
    expect(faults).to_contain_text("0")
    served.live.event("fault", 39, what="gradient not finite, update skipped")
    expect(faults).to_contain_text("1")
    charts = page.locator(".js-plotly-plot")
    # While Streamlit replaces a chart, the old one is there beside the new one.
    expect(charts.filter(has_text="fault (1)")).to_have_count(1)
    expect(charts).to_have_count(1)
    assert page.evaluate("window.sameDocument") is True
    page.get_by_text("Follow the run").click()
    expect(page).to_have_url(re.compile(r"follow=false"))
    # The page is drawn once more as following ends, and may read the run after the address changed.
    page.wait_for_timeout(2500)
    served.live.event("fault", 39, what="gradient not finite, update skipped")
    page.wait_for_timeout(2500)
    expect(faults).to_contain_text("1")
    page.get_by_text("Follow the run").click()
    expect(faults).to_contain_text("2")


def test_tables_and_charts_are_downloaded(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/gpus?run=full")
    settle(page, 6, 1)
    # One below each chart, the last one below the table.
    buttons = page.get_by_role("button", name="CSV", exact=True)
    expect(buttons).to_have_count(7)
    with page.expect_download() as download:
        buttons.last.click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert download.value.suggested_filename == "gpus.csv"
    assert lines[0].startswith('"rank","utilisation_percent"') and len(lines) == 5
    with page.expect_download() as download:
        buttons.first.click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert download.value.suggested_filename == "gpu Utilisation.csv"
    assert lines[0] == '"rank","time_unix_s","utilisation_percent"' and len(lines) == 1 + 4 * 90
    page.locator(".js-plotly-plot").first.hover()
    with page.expect_download() as download:
        page.locator(".modebar-btn[data-title^='Download plot']").first.click()
    assert download.value.suggested_filename == "gpu Utilisation.png"
    picture = Image.open(download.value.path())
    assert picture.width > 500 and np.asarray(picture.convert("L")).std() > 5
