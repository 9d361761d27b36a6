"""The dashboard over the run of a real trainer, while it trains."""

from pathlib import Path

import pytest
from browser import browser, page, start_dashboard, step_shown, stop_dashboard, wait_for_step, watch
from commands import Command
from playwright.sync_api import Page, expect

__all__ = ["browser", "page", "watch"]


@pytest.mark.browser
@pytest.mark.slow
def test_the_dashboard_follows_a_training_run(
    page: Page, nmoe_train: Command, text_folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    out = runs / "live"
    options = ("--text", text_folder, "--steps", "100000", "--out", out, "--device", "cpu")
    trainer = nmoe_train("quickstart", *options)
    while not (out / "metrics" / "1-0.jsonl").exists():
        assert trainer.poll() is None, trainer.communicate()[0]
    dashboard, address = start_dashboard(runs)
    try:
        page.goto(address)
        expect(page.get_by_test_id("stDataFrame")).to_contain_text("live")
        page.goto(f"{address}/run?run=live")
        expect(page.get_by_role("heading", name="live")).to_be_visible()
        expect(page.locator(".scatterlayer .trace").first).to_be_visible()
        before = step_shown(page)
        wait_for_step(page, before + 5)
        assert trainer.poll() is None, "the trainer must still be at work"
        page.goto(f"{address}/router?run=live")
        expect(page.locator(".heatmaplayer image").first).to_be_visible()
        page.goto(f"{address}/configuration?run=live")
        expect(page.get_by_test_id("stDataFrame").first).to_contain_text("data.tokenizer")
        page.goto("about:blank")
    finally:
        trainer.kill()
        trainer.communicate()
        stop_dashboard(dashboard)
