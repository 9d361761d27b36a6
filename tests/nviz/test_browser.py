"""The served dashboard in a real Chromium: pages open, follow a run, and stay on this machine."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import (
    browser,
    chromium,
    page,
    start_dashboard,
    step_shown,
    stop_dashboard,
    wait_for_step,
    watch,
)
from nviz.export import write_html
from playwright.sync_api import Page, expect
from run_folder import RunFolder, expert_record, record, trained

__all__ = ["browser", "page", "watch"]

pytestmark = pytest.mark.browser


@dataclass
class Served:
    """A running dashboard and the runs it shows."""

    address: str
    runs: Path
    live: RunFolder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One dashboard for all tests, over a live run and an ended one."""
    chromium()
    runs = tmp_path_factory.mktemp("runs")
    live = trained(runs, "live", steps=120, name="live run")
    live.save(steps=100_000, step=119)
    trained(runs, "sweep/done", steps=120, name="ended run", status="completed")
    process, address = start_dashboard(runs)
    yield Served(address, runs, live)
    assert stop_dashboard(process).strip() in ("", "Stopping..."), "no warnings, no tracebacks"


def test_the_list_opens_a_run_by_a_click(page: Page, served: Served) -> None:
    page.goto(served.address)
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    grid = page.get_by_test_id("stDataFrame")
    expect(grid).to_contain_text("ended run")
    expect(grid).to_contain_text("live run")
    cells = grid.locator("canvas").first
    box = cells.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 60, box["y"] + 35 + 17)
    expect(page).to_have_url(re.compile(r"/run\?run="))
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible()


def test_a_run_page_follows_the_run(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/run?run=live")
    expect(page.get_by_role("heading", name="live run")).to_be_visible()
    chart = page.get_by_test_id("stPlotlyChart").first
    expect(chart.locator(".scatterlayer .trace").first).to_be_visible()
    before = step_shown(page)
    stopping = threading.Event()

    def train() -> None:
        step = before
        while not stopping.is_set():
            step += 1
            served.live.append(record(step))
            served.live.append_experts(expert_record(step))
            served.live.save(step=step, updated_unix_s=time.time())
            time.sleep(0.1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        wait_for_step(page, before + 11)
    finally:
        stopping.set()
        trainer.join()
    assert page.get_by_test_id("stException").count() == 0


def test_the_router_page_shows_its_heat_maps_and_names_the_dead(page: Page, served: Served) -> None:
    dead = RunFolder(served.runs, "dead-expert", name="one dead", status="completed")
    dead.append_experts(*[expert_record(step) for step in range(101, 160)])
    page.goto(f"{served.address}/router?run=dead-expert")
    expect(page.locator(".heatmaplayer image")).to_have_count(3)
    expect(page.get_by_text("layer 2, expert 5")).to_be_visible()


def test_slash_goes_to_the_search_and_typing_filters_the_list(page: Page, served: Served) -> None:
    page.goto(served.address)
    grid = page.get_by_test_id("stDataFrame")
    expect(grid).to_contain_text("live run")
    page.keyboard.press("/")
    page.keyboard.type("ended")
    expect(page).to_have_url(re.compile(r"q=ended"))
    expect(grid).not_to_contain_text("live run")
    expect(grid).to_contain_text("ended run")


def test_an_exported_run_draws_itself_and_asks_nothing(
    page: Page, served: Served, tmp_path: Path
) -> None:
    out = tmp_path / "run.html"
    write_html(served.runs / "sweep" / "done", out)
    page.set_content(out.read_text())
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    assert page.locator(".js-plotly-plot").count() == page.locator("h2").count()
    assert page.locator(".heatmaplayer image").count() >= 3
    page.get_by_text("Settings", exact=True).click()
    expect(page.get_by_text("model.experts_per_token")).to_be_visible()


def test_the_controls_are_kept_in_the_address(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/run?run=sweep/done&x=Tokens&smooth=0.9")
    chart = page.get_by_test_id("stPlotlyChart").first
    expect(chart).to_contain_text("tokens")
    page.get_by_text("Log scale").click()
    expect(page).to_have_url(re.compile(r"log=true"))
    expect(page).to_have_url(re.compile(r"run=sweep(/|%2F)done"))
    expect(page).to_have_url(re.compile(r"x=Tokens"))


def test_the_other_pages_open_from_the_menu_and_keep_the_run(page: Page, served: Served) -> None:
    page.goto(f"{served.address}/configuration?run=sweep/done")
    expect(page.get_by_test_id("stDataFrame").first).to_contain_text("model.experts_per_token")
    page.get_by_role("link", name="Router").click()
    expect(page).to_have_url(re.compile(r"/router\?run=sweep(/|%2F)done"))
    page.get_by_role("link", name="SQL").click()
    expect(page.get_by_test_id("stDataFrame").first).to_contain_text("sweep/done")


@pytest.mark.parametrize("address", ["compare", "experiments"])
def test_coming_back_to_chosen_runs_finds_them_again(
    page: Page, served: Served, address: str
) -> None:
    page.goto(f"{served.address}/{address}?runs=sweep/done")
    chosen = page.get_by_test_id("stMultiSelect").first
    for back in (False, True):
        expect(chosen).to_contain_text("sweep/done")
        expect(chosen).not_to_contain_text("live")
        expect(page).to_have_url(re.compile(r"\?runs=sweep(/|%2F)done$"))
        page.get_by_role("link", name="SQL").click()
        expect(page.get_by_role("heading", name="SQL")).to_be_visible()
        if back:
            page.go_back()
        else:
            page.get_by_role("link", name=address.capitalize()).click()
    expect(chosen).to_contain_text("sweep/done")
    expect(chosen).not_to_contain_text("live")
    chosen.get_by_role("button", name="Clear all").click()
    expect(page).not_to_have_url(re.compile("runs="))
    expect(chosen).not_to_contain_text("sweep/done")


@pytest.mark.parametrize(
    ("address", "status"), [("run", "running"), ("run", "completed"), ("configuration", "failed")]
)
def test_a_page_says_that_its_run_was_deleted(
    page: Page, served: Served, address: str, status: str
) -> None:
    name = f"doomed-{address}-{status}"
    run = trained(served.runs, name, steps=120, status=status)
    page.goto(f"{served.address}/{address}?run={name}")
    shown = page.get_by_test_id("stPlotlyChart" if address == "run" else "stDataFrame").first
    expect(shown).to_be_visible()
    shutil.rmtree(run.path)
    expect(page.get_by_text("There is no run")).to_be_visible(timeout=60_000)
    expect(shown).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_small_laptop(page: Page, served: Served, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{served.address}/run?run=sweep/done")
    expect(page.get_by_test_id("stPlotlyChart").first).to_be_visible()
    wide = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
    assert wide <= 1280
    ground = page.evaluate(
        "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
    )
    levels = [int(value) for value in re.findall(r"\d+", ground)[:3]]
    assert (sum(levels) / 3 > 128) == (scheme == "light")


def test_a_token_guards_every_page(page: Page, served: Served) -> None:
    process, address = start_dashboard(served.runs, "--token", "let me in")
    try:
        page.goto(f"{address}/run?run=live")
        expect(page.get_by_label("Token", exact=True)).to_be_visible()
        assert "live run" not in page.content()
        page.goto(f"{address}/run?run=live&token=let%20me%20in")
        expect(page.get_by_role("heading", name="live run")).to_be_visible()
        page.get_by_role("link", name="Configuration").click()
        expect(page.get_by_role("heading", name="Configuration")).to_be_visible()
    finally:
        # A page that outlives its server would complain.
        page.goto("about:blank")
        stop_dashboard(process)
