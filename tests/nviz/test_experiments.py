"""Experiments: which settings differ between runs, and the page that shows them side by side."""

import copy
from pathlib import Path
from typing import Any

import pytest
from headless import EVIL, Open, markup, open_page, rerun, texts, titles
from nviz.queries import experiments
from run_folder import RunFolder, record, trained

__all__ = ["open_page"]

CONFIG = {
    "run": {"name": "x", "seed": 1},
    "model": {"layers": 6, "moe": {"experts": 16}},
    "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]},
}


def changed(**values: object) -> dict[str, Any]:
    """CONFIG with some settings changed, by dotted name with `__`."""
    config: dict[str, Any] = copy.deepcopy(CONFIG)
    for name, value in values.items():
        *path, last = name.split("__")
        part = config
        for key in path:
            part = part[key]
        part[last] = value
    return config


def test_differing_settings_come_first_and_names_do_not_count() -> None:
    found = experiments.settings(
        [
            changed(run__name="a"),
            changed(run__name="b", optimizer__lr=1e-3),
            changed(model__moe={"experts": 32, "groups": 4}),
        ]
    )
    assert [(item.name, item.values) for item in found if item.differs] == [
        ("model.moe.experts", ("16", "16", "32")),
        ("model.moe.groups", (None, None, "4")),
        ("optimizer.lr", ("0.0003", "0.001", "0.0003")),
    ]
    assert [item.differs for item in found] == [True] * 3 + [False] * 3
    names = [item.name for item in found]
    assert names == sorted(names[:3]) + sorted(names[3:]) and "run.name" not in names


def test_equal_runs_differ_in_nothing() -> None:
    assert not any(item.differs for item in experiments.settings([CONFIG, CONFIG]))
    assert experiments.settings([]) == []


def three(root: Path) -> None:
    """Three runs: two of a group, one with another learning rate; and one alone."""
    for at, (name, rate) in enumerate((("a", 3e-4), ("b", 1e-3), ("c", 3e-4))):
        config = changed(optimizer__lr=rate, run__name=name)
        run = RunFolder(root, name, config=config, started_unix_s=1e9 + at, group="rates")
        run.append(record(1, loss=2.0 + at), record(2, loss=1.5 + at))
    RunFolder(root, "alone", started_unix_s=5e8, config={"seed": 3})


def test_the_page_begins_with_the_newest_group(root: Path, open_page: Open) -> None:
    three(root)
    app = open_page("experiments")
    assert app.multiselect[0].value == ["c", "b", "a"]
    outcome = app.dataframe[0].value.set_index("outcome")
    assert outcome.loc["training loss"].tolist() == ["3.500", "2.500", "1.500"]
    differs = app.dataframe[1].value
    assert differs.values.tolist() == [["optimizer.lr", "0.0003", "0.001", "0.0003"]]
    assert "1 of 5 settings" in texts(app)
    assert [item.label for item in app.expander] == ["4 equal settings"]


def test_runs_and_search_come_from_the_address(root: Path, open_page: Open) -> None:
    three(root)
    app = open_page("experiments", runs=["alone", "a"], find="layers")
    assert app.multiselect[0].value == ["alone", "a"]
    assert app.dataframe[1].value.values.tolist() == [["model.layers", "–", "6"]]
    nothing = open_page("experiments", runs=["alone", "a"], find="zzz")
    assert "No differing setting matches" in texts(nothing)
    unknown = open_page("experiments", runs=["../../etc", "a"])
    assert "etc" not in texts(unknown) and unknown.dataframe


def test_one_run_and_none_are_answered(root: Path, open_page: Open) -> None:
    three(root)
    app = open_page("experiments", runs=["a"])
    assert "All settings are equal" in texts(app)
    app.multiselect[0].set_value([])
    assert "Choose at least one run" in texts(rerun(app))


def test_equal_names_are_told_apart_by_their_keys(root: Path, open_page: Open) -> None:
    trained(root, "x/one", steps=4, name="same")
    trained(root, "y/one", steps=4, name="same")
    app = open_page("experiments")
    heads = list(app.dataframe[0].value.columns[1:])
    assert sorted(heads) == ["same (x/one)", "same (y/one)"]


def test_an_empty_root_says_what_to_run(open_page: Open) -> None:
    assert "No runs here yet" in texts(open_page("experiments"))


def test_names_and_settings_stay_text(root: Path, open_page: Open) -> None:
    RunFolder(root, "a", name=EVIL, device=EVIL, config={EVIL: EVIL})
    RunFolder(root, "b", name=EVIL, config={EVIL: 2})
    app = open_page("experiments")
    assert "What differs" in titles(app)
    assert not any(mark in markup(app) for mark in ("<", "](", "**", ":red["))


@pytest.mark.parametrize("page", ["experiments", "compare"])
def test_the_first_choice_stands_in_the_address(root: Path, open_page: Open, page: str) -> None:
    for number in range(3):
        run = RunFolder(
            root, f"run-{number}", name="the same", group="sweep", started_unix_s=1e9 + number
        )
        run.append({"step": 0, "loss/train": 1.0})
    app = open_page(page)
    first = ["run-2", "run-1", "run-0"]
    assert app.query_params["runs"] == first and app.multiselect[0].value == first
    RunFolder(root, "newer", started_unix_s=2e9)
    assert open_page(page, runs=app.query_params["runs"]).multiselect[0].value == first
    assert rerun(app).multiselect[0].value == first
