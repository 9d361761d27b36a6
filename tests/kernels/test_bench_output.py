"""What the bench command writes: JSON, CSV, a chart, and the tables of the README from them."""

import csv
import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from nmoe_kernels import cli
from nmoe_kernels.bench import Measurement, command, output
from nmoe_kernels.bench.command import Options, run_gemm, run_moe, run_router
from nmoe_kernels.bench.timing import Times
from nmoe_kernels.errors import KernelError

ROOT = Path(__file__).parents[2]
FILES = ("figures.json", "figures.csv", "figures.svg")


def options(**changes):
    given = {"device": "cpu", "shapes": None, "routings": "uniform", "dtype": "float32"}
    return Options(**(given | {"repeats": 2} | changes))


def written(tmp_path, kind):
    """The report of a small run, and its options."""
    files = [tmp_path / name for name in FILES]
    names = dict(zip(("json_file", "csv_file", "chart_file"), files, strict=True))
    if kind == "router":
        run_router(options(shapes=["64,32,8,2"], **names), "triton,reference", "softmax", False)
    elif kind == "gemm":
        run_gemm(options(shapes=["64,32,16,8,2"], **names), "all")
    else:
        run_moe(options(shapes=["64,32,16,8,2"], **names), "torch,triton", "none", False)
    return json.loads(files[0].read_text())


@pytest.mark.parametrize("kind", ["router", "gemm", "moe"])
def test_the_figures_are_written_with_the_machine(tmp_path, kind, capsys):
    report = written(tmp_path, kind)
    assert (report["bench"], report["repeats"]) == (kind, 2)
    assert report["hardware"]["torch"] == torch.__version__
    assert report["ceilings"]["dense_tflops"] > 0 and report["ceilings"]["copy_gbps"] > 0
    shown = capsys.readouterr().out
    assert all(row["contender"] in shown for row in report["rows"])
    rows = list(csv.DictReader((tmp_path / "figures.csv").open()))
    for row, line in zip(report["rows"], rows, strict=True):
        for name, value in row.items():
            assert line[name] == ("" if value is None else str(value)), name
    if kind == "router":
        assert {"moe-engine on a T4"} <= {row["source"] for row in report["published"]}


@pytest.mark.parametrize("kind", ["router", "gemm", "moe"])
def test_bars_are_as_long_as_the_times(tmp_path, kind):
    report = written(tmp_path, kind)
    chart = ElementTree.parse(tmp_path / "figures.svg").getroot()
    tag = "{http://www.w3.org/2000/svg}"
    widths = [float(bar.get("width")) for bar in chart.iter(f"{tag}rect")]
    passes = list(dict.fromkeys(
        name.removesuffix("_runs") for row in report["rows"] for name in row if "_runs" in name
    ))  # fmt: skip
    for name in passes:
        times = [row[f"{name}_ms"] for row in report["rows"] if row.get(f"{name}_ms")]
        want = [output.BAR_WIDTH * ms / max(times) for ms in times]
        here, widths = widths[: len(times)], widths[len(times) :]
        assert here == pytest.approx(want, abs=0.06)
    assert widths == []


def test_what_is_not_a_number_is_null(tmp_path):
    bad = Measurement("1", "uniform", "float32", "odd", error=float("inf"), note="wrong")
    report = json.loads(output.as_json({"bench": "moe"}, [bad]))
    assert report["rows"][0]["error"] is None
    assert report["rows"][0]["note"] == "wrong"


def test_names_in_a_chart_are_escaped():
    row = Measurement("1,2", "uniform", "float32", "<a&b>")
    row.times["forward"] = Times(1.0, 1.0, 1.0, 1.0, 1)
    chart = ElementTree.fromstring(output.as_chart("a < b", [row]))
    assert "<a&b>" in [text.text for text in chart.iter() if text.text]


def test_a_run_that_is_cut_short_leaves_the_figures_before(tmp_path, monkeypatch):
    calls = []
    measure = command.measure_moe

    def dying(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(command, "measure_moe", dying)
    file = tmp_path / "moe.json"
    with pytest.raises(KeyboardInterrupt):
        run_moe(
            options(shapes=["64,32,16,8,2"], routings="uniform,zipf", json_file=file),
            "torch", "none", False,
        )  # fmt: skip
    assert {row["routing"] for row in json.loads(file.read_text())["rows"]} == {"uniform"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe.json"]


@pytest.mark.parametrize(
    ("changes", "backends", "peers", "wanted"),
    [
        ({"shapes": ["64,32"]}, None, "none", "64,32"),
        ({"shapes": ["64,32,16,8,x"]}, None, "none", "T,H,I,E,K"),
        ({"shapes": ["huge"]}, None, "none", "h4096-e128"),
        ({"shapes": ["64,32,16,8,9"]}, None, "none", "9 of 8 experts"),
        ({"shapes": ["64,8,16,32,2"]}, None, "none", "width of 32"),
        ({"shapes": ["0,32,16,8,2"]}, None, "none", "1 or more"),
        ({"routings": "skewed"}, None, "none", "uniform, zipf, onehot"),
        ({"dtype": "int8"}, None, "none", "bfloat16"),
        ({"device": "tpu"}, None, "none", "--device cpu"),
        ({}, "magic", "none", "triton, torch, reference"),
        ({}, "", "none", "there is no backend ''"),
        ({}, None, "magic", "torch_eager, torch_compiled, sonicmoe, liger"),
        ({"json_file": Path("/nowhere/at/all.json")}, None, "none", "/nowhere/at/all.json"),
        ({"chart_file": Path("/")}, None, "none", "cannot write /"),
    ],
)
def test_options_that_cannot_be_are_one_line(changes, backends, peers, wanted):
    with pytest.raises(KernelError, match="E-BENCH") as caught:
        run_moe(options(**changes), backends, peers, False)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_benchmarks_check_their_names_too():
    with pytest.raises(KernelError, match="there is no score 'tanh'"):
        run_router(options(), "all", "tanh", False)
    with pytest.raises(KernelError, match="there is no contender 'cublas'"):
        run_gemm(options(), "cublas")
    with pytest.raises(KernelError, match="T,H,E,K"):
        run_router(options(shapes=["64,32,16,8,2"]), "all", "softmax", False)


def test_presets_are_shapes_of_their_own():
    shapes = command.parse_shapes(["fine", "1,2,3,2,1"], command.Shape, command.LAYERS, "cuda")
    assert list(map(str, shapes)) == ["24576,1536,256,128,8", "1,2,3,2,1"]
    on_gpu = command.parse_shapes(None, command.Shape, command.LAYERS, "cuda")
    assert [str(s) for s in on_gpu] == [
        "32768,4096,1024,128,8",
        "32768,2048,1024,64,8",
        "32768,2048,1408,64,6",
        "24576,1536,256,128,8",
        "8192,7168,2048,64,8",
    ]
    on_cpu = command.parse_shapes(None, command.Shape, command.LAYERS, "cpu")
    assert [str(s) for s in on_cpu] == ["1024,256,128,16,4"]


@pytest.mark.parametrize("kind", ["router", "gemm", "moe"])
def test_the_command_line_runs(kind, tmp_path, monkeypatch, capsys):
    shape = "64,32,8,2" if kind == "router" else "64,32,16,8,2"
    file = tmp_path / "out.json"
    words = ["--device", "cpu", "--shape", shape, "--dtype", "float32", "--repeats", "1"]
    words += ["--routing", "all", "--json", str(file)]
    words += {"moe": ["--peers", "none"], "router": ["--contenders", "reference"], "gemm": []}[kind]
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "bench", kind, *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert f"{shape}, onehot" in capsys.readouterr().out
    assert len({row["routing"] for row in json.loads(file.read_text())["rows"]}) == 3


def test_a_mistake_on_the_command_line_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nmoe-kernels", "bench", "moe", "--device", "gpu"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error E-BENCH: there is no device 'gpu'") and error.count("\n") == 1


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """The module that makes the README's tables, reading results from a folder of ours."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "infra/bench/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


@pytest.mark.parametrize("kind", ["router", "gemm", "moe"])
def test_tables_show_the_figures(tables, tmp_path, kind):
    report = written(tmp_path, kind)
    text = tables.table("figures")
    head, *lines = [line for line in text.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    timed = [row for row in report["rows"] if row.get("forward_ms") or row.get("up_ms")]
    field, name, digits = {
        "router": ("forward_ms", "forward ms", ".4f"),
        "gemm": ("error", "error", ".1e"),
        "moe": ("both_ms", "both ms", ".2f"),
    }[kind]
    for row, line in zip(timed, lines[1 : 1 + len(timed)], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[columns.index("contender")] == row["contender"]
        want = "-" if row[field] is None else format(row[field], digits)
        assert cells[columns.index(name)] == want
    assert "triton: it runs on cuda, not on cpu" in text
    assert "peak GiB" not in columns  # nobody has one on a CPU
    assert ("moe-engine on a T4" in text) == (kind == "router")


def test_a_share_is_shown_as_reads_of_x(tables):
    row = {"forward_share": 0.5, "first_call_cold_s": 12.34, "first_call_warm_s": 1.0}
    assert tables.ratio("forward_share")(row) == "2.00x"
    assert tables.first_call(row) == "12.3 / 1.0"
    assert tables.first_call({}) == "-"
