"""What a run writes beside its checkpoints: metrics, run.json, events. Every field must move."""

import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from nmoe_data.loader import Loader
from nmoe_data.stats import unigram_loss
from nmoe_kernels import pick_backend
from nmoe_train.config import Config
from nmoe_train.data import TrainingData, to_step
from nmoe_train.loop import Outcome
from nmoe_train.model import Transformer
from nmoe_train.optim import build_optimizer
from nmoe_train.step import step_record, train_step
from nmoe_train.telemetry import MetricsWriter, RunFolder, training_flops_per_token
from nmoe_train.telemetry.timers import StageTimer

Tiny = Callable[..., Config]
Run = Callable[..., Outcome]
Rows = Callable[..., list[dict[str, Any]]]
NOTHING: dict[str, Any] = {"layers": [], "load": [], "bias": []}


def live(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"1-0{kind}.jsonl").read_text().splitlines()]


def test_every_step_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 1, 0, seal_every=100)
    for step in range(1, 5):
        writer.step({"step": step, "loss/train": 1.0 / step}, {"step": step, "load": [[step]]})
        assert [row["step"] for row in live(tmp_path)] == list(range(1, step + 1))
        assert live(tmp_path, "-experts")[-1] == {"step": step, "load": [[step]]}
    writer.close()


def test_the_live_file_is_readable_while_a_run_goes_on(tiny: Tiny, run: Run) -> None:
    seen: list[int] = []
    folder = tiny().run.dir / "metrics"

    def look(record: dict[str, Any]) -> None:
        assert live(folder)[-1] == {**record, "loss/train": record["loss/train"]}
        assert live(folder, "-experts")[-1]["step"] == record["step"]
        seen.append(len(live(folder)))

    run(tiny(), look)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_rows_are_sealed_into_parts_and_leave_the_live_file(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 3, 0, seal_every=4)
    for step in range(1, 11):
        writer.step({"step": step, "x": step / 3}, {"step": step, "load": [[step, 0], [1, 2]]})
    assert [json.loads(line)["step"] for line in (tmp_path / "3-0.jsonl").open()] == [9, 10]
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "3-0-000-experts.parquet",
        "3-0-000.parquet",
        "3-0-001-experts.parquet",
        "3-0-001.parquet",
        "3-0-002-experts.parquet",
        "3-0-002.parquet",
        "3-0-experts.jsonl",
        "3-0.jsonl",
    ]
    parts = [pq.read_table(tmp_path / f"3-0-{n:03d}.parquet").to_pylist() for n in range(3)]
    assert [[row["step"] for row in part] for part in parts] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10],
    ]
    assert parts[1][2]["x"] == 7 / 3
    loads = pq.read_table(tmp_path / "3-0-001-experts.parquet").to_pylist()
    assert loads[0] == {"step": 5, "load": [[5, 0], [1, 2]]}
    assert (tmp_path / "3-0.jsonl").read_text() == ""


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    values = {"nan": math.nan, "up": math.inf, "down": -math.inf}
    writer = MetricsWriter(tmp_path, 1, 0, seal_every=10)
    writer.step({"step": 1, **values}, {"step": 1, "bias": [[math.nan, 1.0]]})
    assert live(tmp_path)[0] == {"step": 1, "nan": "NaN", "up": "Infinity", "down": "-Infinity"}
    assert live(tmp_path, "-experts")[0]["bias"] == [["NaN", 1.0]]
    for line in (tmp_path / "1-0.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    writer.close()
    row = pq.read_table(tmp_path / "1-0-000.parquet").to_pylist()[0]
    assert math.isnan(row["nan"])
    assert (row["up"], row["down"]) == (math.inf, -math.inf)


def test_rows_may_differ_in_their_keys(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 1, 0, seal_every=10)
    records: list[dict[str, Any]] = [
        {"step": 1, "a": 1.0},
        {"step": 2, "b": 2.5, "a": 2.0},
        {"step": 3, "c": "text", "b": 3.5},
        {"step": 4},
    ]
    for record in records:
        writer.step(record, {"step": record["step"], **NOTHING})
    writer.close()
    table = pq.read_table(tmp_path / "1-0-000.parquet")
    assert table.column_names == ["step", "a", "b", "c"]
    back = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
    assert back == [
        dict(sorted(record.items(), key=lambda kv: kv[0] != "step")) for record in records
    ]


@pytest.mark.parametrize("first", [0, None])
def test_a_column_may_turn_out_to_hold_fractions(tmp_path: Path, first: int | None) -> None:
    writer = MetricsWriter(tmp_path, 1, 0, seal_every=10)
    for step, value in enumerate((first, 1.5, math.nan)):
        writer.step(
            {"step": step, "x": value}, {"step": step, "bias": [] if step == 0 else [[0.5]]}
        )
    writer.close()
    column = pq.read_table(tmp_path / "1-0-000.parquet")["x"].to_pylist()
    assert column[:2] == [first, 1.5]
    assert math.isnan(column[2])
    biases = pq.read_table(tmp_path / "1-0-000-experts.parquet")["bias"].to_pylist()
    assert biases == [[], [[0.5]], [[0.5]]]


def test_an_attempt_without_steps_leaves_no_parts(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, 1, 0, seal_every=10).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0-experts.jsonl", "1-0.jsonl"]


FIELDS = {
    "step",
    "time_unix_s",
    "tokens",
    "loss/train",
    "loss/ce",
    "loss/z",
    "loss/balance",
    "grad_norm",
    "lr/dense",
    "lr/router",
    "lr/expert",
    "tokens_per_s",
    "mfu",
    "step_ms",
    "time_ms/data",
    "time_ms/forward",
    "time_ms/backward",
    "time_ms/optimizer",
    "router/load_imbalance",
    "router/entropy",
    "router/bias_range",
    "router/dead_experts",
    "router/invalid",
    "active_ranks",
}


def test_a_record_says_what_the_step_did(tiny: Tiny, run: Run, rows: Rows) -> None:
    config = tiny(**{"telemetry.peak_tflops": 0.01, "eval.every": 3})
    began = time.time()
    run(config)
    ended = time.time()
    records = rows(config.run.dir)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [64, 128, 192, 256, 320, 384]
    flops = training_flops_per_token(config.model, 257, 16)
    times = [began, *(record["time_unix_s"] for record in records), ended]
    assert times == sorted(times)
    for record in records:
        assert record.keys() >= FIELDS
        stages = [value for name, value in record.items() if name.startswith("time_ms/")]
        assert min(stages) > 0
        assert sum(stages) <= record["step_ms"]
        assert record["tokens_per_s"] == pytest.approx(64 / (record["step_ms"] / 1e3))
        assert record["mfu"] == pytest.approx(record["tokens_per_s"] * flops / 1e10)
        assert record["loss/train"] == pytest.approx(
            record["loss/ce"] + 1e-4 * record["loss/balance"], rel=1e-6
        )
        assert record["active_ranks"] == 1
    # What a checkpoint took stands in the step after it; every=2 saves after 2, 4 and 6.
    assert [r["step"] for r in records if "checkpoint/stall_ms" in r] == [3, 5]
    # It is complete some steps later; what follows waits for that at the latest.
    assert {r["step"] for r in records if "checkpoint/commit_ms" in r} <= {3, 4, 5, 6}
    for name in ("checkpoint/stall_ms", "checkpoint/commit_ms"):
        assert any(name in record for record in records)
        assert all(record.get(name, 1.0) > 0 for record in records)
    assert [record["step"] for record in records if "loss/validation" in record] == [3, 6]
    for name in ("loss/ce", "loss/z", "loss/balance", "grad_norm", "router/entropy"):
        assert len({record[name] for record in records}) == 6, name
    assert len({record["lr/dense"] for record in records}) > 1
    assert records[-1]["loss/ce"] < records[0]["loss/ce"]


def test_without_a_known_peak_there_is_no_mfu(tiny: Tiny, run: Run, rows: Rows) -> None:
    run(tiny(**{"train.steps": 1}))
    assert "mfu" not in rows(tiny().run.dir)[0]


def test_router_figures_agree_with_a_count_by_hand(tiny: Tiny, run: Run, rows: Rows) -> None:
    config = tiny(**{"model.layers": 3, "train.steps": 4})
    run(config)
    experts = rows(config.run.dir, kind="-experts")
    for record, loads in zip(rows(config.run.dir), experts, strict=True):
        assert loads["step"] == record["step"]
        assert loads["layers"] == [1, 2]
        assert [sum(load) for load in loads["load"]] == [4 * 16 * 2] * 2
        imbalance = [max(load) / (sum(load) / len(load)) for load in loads["load"]]
        assert record["router/load_imbalance"] == pytest.approx(sum(imbalance) / 2)
        shares = [[n / sum(load) for n in load] for load in loads["load"]]
        entropy = [-sum(p * math.log(p) for p in share if p) for share in shares]
        assert record["router/entropy"] == pytest.approx(sum(entropy) / 2)
        assert record["router/dead_experts"] == sum(load.count(0) for load in loads["load"])
        ranges = [max(bias) - min(bias) for bias in loads["bias"]]
        assert record["router/bias_range"] == pytest.approx(max(ranges))
    assert experts[0]["load"] != experts[1]["load"]
    assert experts[0]["bias"] != experts[-1]["bias"]


def test_expert_loads_sum_over_micro_batches(tiny: Tiny, run: Run, rows: Rows) -> None:
    run(tiny(**{"train.micro_batch_size": 1, "train.steps": 1}))
    assert sum(rows(tiny().run.dir, kind="-experts")[0]["load"][0]) == 4 * 16 * 2


def one_step(
    config: Config, model: Transformer, data: TrainingData
) -> tuple[dict[str, Any], dict[str, Any]]:
    share = to_step(Loader(data.train, seq_len=16, seed=0).batch(0, 4))
    timer = StageTimer(torch.device("cpu"))
    optimizer = build_optimizer(model, config.optimizer)
    return step_record(train_step(model, optimizer, share, config, 64, timer))


def test_a_router_that_favours_one_expert_shows(
    tiny: Tiny, build: Callable[..., Transformer], data: TrainingData
) -> None:
    config = tiny(**{"model.moe.top_k": 1})
    even, _ = one_step(config, build(config), data)
    model = build(config)
    model.moe_blocks()[1].experts.router.bias[2] = 100.0
    uneven, experts = one_step(config, model, data)
    assert experts["load"] == [[0, 0, 64, 0]]
    assert uneven["router/load_imbalance"] == 4.0
    assert uneven["router/entropy"] == 0.0
    assert uneven["router/dead_experts"] == 3
    assert uneven["router/bias_range"] == pytest.approx(100.0, abs=0.03)
    assert even["router/load_imbalance"] < 4.0


def test_tokens_without_finite_logits_are_counted(
    tiny: Tiny, build: Callable[..., Transformer], data: TrainingData
) -> None:
    config = tiny(**{"train.micro_batch_size": 1})
    healthy, _ = one_step(config, build(config), data)
    assert healthy["router/invalid"] == 0
    model = build(config)
    model.layers[1].ffn_norm.weight.data[0] = math.nan
    record, _ = one_step(config, model, data)
    assert record["router/invalid"] == 64
    assert record["skipped"] == 1
    assert math.isnan(record["grad_norm"])


def test_the_timer_adds_up_and_starts_again() -> None:
    timer = StageTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.stage("a"):
            time.sleep(0.01)
    with timer.stage("b"):
        pass
    first = timer.milliseconds()
    assert first.keys() == {"time_ms/a", "time_ms/b"}
    assert first["time_ms/a"] >= 20
    assert 0 <= first["time_ms/b"] < first["time_ms/a"]
    assert timer.milliseconds() == {}


def test_run_json_says_what_the_run_is(tiny: Tiny, run: Run, data: TrainingData) -> None:
    config = tiny(**{"run.name": "a name", "run.tags": ["x", "y"], "run.group": "seeds"})
    before = time.time()
    outcome = run(config)
    record = json.loads((config.run.dir / "run.json").read_text())
    assert record["schema_version"] == 1
    assert record["run_id"] == "run"
    assert (record["name"], record["tags"], record["group"]) == ("a name", ["x", "y"], "seeds")
    assert (record["status"], record["step"], record["steps"]) == ("completed", 6, 6)
    assert record["config"] == config.model_dump(mode="json")
    assert record["layout"] == {"dp": 1, "tp": 1, "pp": 1, "ep": 1}
    packages = ("nmoe-train", "nmoe-data", "nmoe-kernels")
    versions = {package: importlib.metadata.version(package) for package in packages}
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    assert record["versions"] == versions
    assert record["backend"] == pick_backend(None, "cpu", torch.float32)
    assert record["parameters"] == sum(p.numel() for p in outcome.model.parameters())
    assert record["data"]["tokens"] == data.train.tokens
    unigram = unigram_loss(data.train, data.held_out)
    assert record["results"] == outcome.results
    assert record["results"].keys() == {"loss/validation", "loss/unigram"}
    assert record["results"]["loss/unigram"] == pytest.approx(unigram)
    stamps = [before] + [record[f"{n}_unix_s"] for n in ("started", "ended", "updated")]
    assert stamps == sorted(stamps)
    assert len(record["hosts"]) == 1
    assert record["device"] == "cpu (1 threads)"


def test_a_run_without_a_name_is_called_as_its_folder(tiny: Tiny, run: Run) -> None:
    run(tiny(**{"train.steps": 1}))
    assert json.loads((tiny().run.dir / "run.json").read_text())["name"] == "run"


def test_run_json_is_whole_and_says_running_while_the_run_goes_on(tiny: Tiny, run: Run) -> None:
    statuses: list[str] = []

    def look(_: dict[str, Any]) -> None:
        statuses.append(json.loads((tiny().run.dir / "run.json").read_text())["status"])

    run(tiny(), look)
    assert statuses == ["running"] * 6


def test_events_come_in_the_order_in_which_things_happened(
    tiny: Tiny, run: Run, events: Callable[[Path], list[dict[str, Any]]]
) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["step"] == 5:
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError):
        run(tiny(), stop)
    run(tiny())
    found = events(tiny().run.dir)
    assert [(event["event"], event["step"]) for event in found] == [
        ("start", 0),
        ("checkpoint", 2),
        ("checkpoint", 4),
        ("fault", 5),
        ("end", 5),
        ("resume", 4),
        ("eval", 6),
        ("checkpoint", 6),
        ("end", 6),
    ]
    assert found[3]["what"] == "a fault"
    assert [event["status"] for event in found if event["event"] == "end"] == [
        "failed",
        "completed",
    ]
    assert all(event["commit_ms"] > 0 for event in found if event["event"] == "checkpoint")
    stamps = [event["time_unix_s"] for event in found]
    assert stamps == sorted(stamps)


def test_every_validation_is_an_event_with_its_loss(
    tiny: Tiny, run: Run, rows: Rows, events: Callable[[Path], list[dict[str, Any]]]
) -> None:
    outcome = run(tiny(**{"eval.every": 2}))
    want = {r["step"]: r["loss/validation"] for r in rows(tiny().run.dir) if "loss/validation" in r}
    found = [event for event in events(tiny().run.dir) if event["event"] == "eval"]
    assert [event["step"] for event in found] == [2, 4, 6]
    assert {event["step"]: event["loss/validation"] for event in found} == want
    assert outcome.results["loss/validation"] == want[6]


def test_progress_reaches_run_json_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nmoe_train.telemetry.run_folder as module

    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    folder = RunFolder(tmp_path)
    folder.begin(0, steps=9)

    def step_on_disk() -> int:
        return int(json.loads((tmp_path / "run.json").read_text())["step"])

    folder.progress(1)
    assert step_on_disk() == 0
    now = 102.5
    folder.progress(2)
    assert step_on_disk() == 2
    folder.end("completed")
