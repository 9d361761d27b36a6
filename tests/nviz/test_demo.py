"""The demo's run folders: seeded, resumable, and what the readers of real ones expect."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from nmoe_data.shards import read_manifest
from nmoe_data.shards.layout import map_dataset
from nviz.demo import Progress, write_demo
from nviz.demo.plan import FATES, LARGEST_RUN, Shape, draw_plan
from nviz.errors import VizError
from nviz.queries import curves, experts
from nviz.store import ColumnReader, ExpertLoads, RunIndex
from nviz.store.events import EventLog

NOW = 1_790_000_000.0
RUNS, STEPS = 24, 300


def write(out: Path, runs: int = RUNS, seed: int = 3, now: float = NOW) -> list[Progress]:
    """Writes a demo; returns what it said on the way."""
    said: list[Progress] = []
    write_demo(out, runs=runs, steps=STEPS, seed=seed, progress=said.append, now_unix_s=now)
    return said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One demo for all tests that only read it."""
    out = tmp_path_factory.mktemp("demo") / "runs"
    write(out)
    return out


def digests(out: Path) -> dict[str, str]:
    """A hash of every file by its path."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_equal_arguments_give_equal_files_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write(tmp_path / name, runs=4, seed=seed)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    # What names the folder itself differs with the folder.
    own = {name for name in a if name.endswith("run.json")}
    assert {n: d for n, d in a.items() if n not in own} == {
        n: d for n, d in b.items() if n not in own
    }
    parquet = [name for name in a if name.endswith("parquet")]
    assert parquet and all(a[name] != c.get(name) for name in parquet)


def test_an_interrupted_demo_goes_on_where_it_stopped(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    write(out, runs=4)
    whole = digests(out)
    victim = sorted(path for path in out.iterdir() if (path / "run.json").exists())[1]
    victim.rename(out / f".{victim.name}.partial")
    said = write(out, runs=4, now=NOW + 99.0)
    assert [item.done for item in said] == [4], "one run was missing"
    assert digests(out) == whole


@pytest.mark.parametrize("other", ["a file", "another seed"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, other: str) -> None:
    if other == "a file":
        (tmp_path / "notes.txt").write_text("mine")
    else:
        write(tmp_path, runs=1, seed=9)
    with pytest.raises(VizError, match="E-DEMO-OUT"):
        write(tmp_path, runs=1)


def test_every_run_is_read_without_a_problem(made: Path) -> None:
    runs = RunIndex(made).refresh(NOW)
    assert len(runs) == RUNS
    assert {run.status for run in runs.values()} >= {
        "completed", "failed", "interrupted", "running"
    }  # fmt: skip
    columns = ColumnReader()
    for run in runs.values():
        rows = columns.rows(run.folder, ["loss/train", "tokens"])
        loads = ExpertLoads(run.folder)
        loads.refresh()
        assert rows.problems == () and loads.problems() == []
        last = int(rows.step[-1]) if len(rows.step) else 0
        assert last == run.step
        assert np.unique(rows.step[~rows.superseded]).tolist() == list(range(1, last + 1))


def test_each_fate_is_there_and_is_what_it_says(made: Path) -> None:
    runs = RunIndex(made).refresh(NOW)
    plans = [draw_plan(index, STEPS, 3, NOW) for index in range(RUNS)]
    assert {plan.fate for plan in plans} == set(FATES)
    columns = ColumnReader()
    for plan in plans:
        run = runs[plan.run_id]
        rows = columns.rows(run.folder, ["loss/train", "step_ms"])
        log = EventLog(run.folder)
        log.refresh()
        kinds = [event.event for event in log.events]
        loss = rows.columns.get("loss/train")
        bad = loss is not None and not np.isfinite(loss.values).all()
        assert bad == (plan.fate in ("non-finite", "failed"))
        assert rows.superseded.any() == (len(plan.attempts) == 2) == ("resume" in kinds)
        assert ("recovery" in kinds) == (plan.fate == "recovered")
        assert ("end" in kinds) == (run.status not in ("running", "stalled"))
        times = [event.time_unix_s for event in log.events]
        assert times == sorted(times, key=lambda item: item or 0.0)
    silent = runs[next(plan.run_id for plan in plans if plan.fate == "silent")]
    live = (silent.folder / "metrics" / "1-0.jsonl").read_bytes()
    assert live and not live.endswith(b"\n")


def test_a_dead_expert_is_found_where_the_plan_has_one(made: Path) -> None:
    for index in range(RUNS):
        plan = draw_plan(index, STEPS, 3, NOW)
        loads = ExpertLoads(made / plan.run_id)
        loads.refresh()
        _, idle = experts.idle_experts(loads.blocks())
        dead = [(item.layer, item.dead) for item in idle if item.dead]
        expected = [(plan.shape.layers - 1, [5 % plan.shape.experts])]
        assert dead == (expected if plan.fate == "dead experts" else [])


def test_ranks_and_gpus_are_those_of_the_layout(made: Path) -> None:
    for index in range(RUNS):
        plan = draw_plan(index, STEPS, 3, NOW)
        folder = made / plan.run_id
        if plan.last_step == 0:
            continue
        ranks = {path.name.split("-")[1].split(".")[0] for path in folder.glob("metrics/1-*")}
        assert len(ranks) == plan.shape.ranks
        assert (folder / "gpu.parquet").exists() == plan.shape.on_gpu
        if plan.shape.on_gpu:
            read = pq.read_table(folder / "gpu.parquet")
            assert set(read["rank"].to_pylist()) == set(range(plan.shape.ranks))


def test_runs_of_a_group_differ_in_the_seed_alone(made: Path) -> None:
    group = [draw_plan(index, STEPS, 3, NOW) for index in range(4, 8)]
    runs = RunIndex(made).refresh(NOW)
    configs = [runs[plan.run_id].config for plan in group]
    assert len({plan.group for plan in group}) == 1
    assert [config["run"]["seed"] for config in configs] == [0, 1, 2, 3]
    assert all(config["model"] == configs[0]["model"] for config in configs)
    assert len({runs[plan.run_id].fingerprint for plan in group}) == 4
    losses = [
        curves.table_of(ColumnReader().rows(made / plan.run_id, ["loss/train"])) for plan in group
    ]
    ends = [float(table.values["loss/train"][:50].mean()) for table in losses if len(table.x)]
    assert len(set(ends)) == len(ends)


def test_the_shards_are_a_dataset_that_nmoe_data_reads(made: Path) -> None:
    for split in ("train", "held-out"):
        folder = made / "shards" / split
        manifest = read_manifest(folder)
        mapped = map_dataset(folder, manifest)
        for shard, (tokens, index) in zip(manifest.shards, mapped, strict=True):
            content = (folder / shard.name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256
            assert (int(tokens.min()), int(tokens.max())) == (shard.min_id, shard.max_id)
            assert (tokens == 256).sum() == shard.documents == len(index)
            assert int(index["length"].sum()) == shard.tokens
    record = json.loads(next(made.glob("*/run.json")).read_text())
    assert record["data"]["tokens"] == read_manifest(made / "shards" / "train").tokens


def test_checkpoints_are_complete_but_for_the_one_that_a_run_died_in(made: Path) -> None:
    for index in range(RUNS):
        plan = draw_plan(index, STEPS, 3, NOW)
        folders = sorted((made / plan.run_id / "checkpoints").glob("step-*"))
        complete = [path for path in folders if (path / "COMPLETE").exists()]
        assert len(folders) - len(complete) == (plan.fate == "silent")
        for path in complete:
            meta = (path / "meta.json").read_bytes()
            assert hashlib.sha256(meta).hexdigest() == (path / "COMPLETE").read_text()
            for name, file in json.loads(meta)["files"].items():
                content = (path / name).read_bytes()
                assert (len(content), hashlib.sha256(content).hexdigest()) == (
                    file["bytes"], file["sha256"]
                )  # fmt: skip


def test_the_largest_run_has_the_shape_that_the_heat_map_is_measured_with() -> None:
    shape: Shape = draw_plan(LARGEST_RUN, 2000, 0, NOW).shape
    assert (shape.layers - shape.dense_layers, shape.experts) == (61, 256)
