"""The command line: what it prints, where, and how it ends."""

import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nmoe_train.checkpoint import write_checkpoint
from nmoe_train.cli import app, main
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target
from s3_bucket import NAME, Bucket, bucket
from safetensors.torch import load_file
from typer.testing import CliRunner

__all__ = ["bucket"]

Tree = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
Call = Callable[..., tuple[int, str, str]]


def toml(tree: dict[str, Any], prefix: str = "") -> str:
    """A nested mapping as TOML."""
    sections = {key: value for key, value in tree.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(tree[key])}" for key in tree.keys() - sections.keys()]
    head = f"[{prefix}]\n" if prefix else ""
    text = head + "\n".join(lines) + "\n"
    for key, value in sections.items():
        text += toml(value, f"{prefix}.{key}" if prefix else key)
    return text


@pytest.fixture
def file(tiny_tree: Tree, tmp_path: Path) -> Write:
    def write(**overrides: Any) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(toml(tiny_tree(**overrides)))
        return path

    return write


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `nmoe-train ARGUMENTS...` in this process: exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nmoe-train", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        printed = capfd.readouterr()
        return int(code), printed.out, printed.err

    return run


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nmoe_train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_user_error_in_a_real_process_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = process("run", tmp_path / "absent.toml")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error E-CONFIG-FILE: ")
    assert result.stderr.count("\n") == 1


def test_help_schema_and_mistakes_do_not_wait_for_torch() -> None:
    code = """
import sys
from nmoe_train.cli import main
for arguments in (["--help"], ["validate", "--schema"], ["run", "absent.toml"]):
    sys.argv = ["nmoe-train", *arguments]
    try:
        main()
    except SystemExit:
        pass
    assert "torch" not in sys.modules, arguments
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_a_valid_configuration_says_what_it_asks_for(file: Write) -> None:
    result = CliRunner().invoke(app, ["validate", str(file())])
    assert result.exit_code == 0
    assert "6 steps of 64 tokens" in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--set", "train.stepz=1"], "E-CONFIG"),
        (["--set", "train.steps"], "E-CONFIG-SET"),
        (["--set", "parallel.ep=3"], "E-LAYOUT"),
    ],
)
def test_validate_reports_in_one_line(
    file: Write, call: Call, arguments: list[str], code: str
) -> None:
    exit_code, out, err = call("validate", file(), *arguments)
    assert (exit_code, out) == (2, "")
    assert err.startswith(f"error {code}: ")
    assert err.count("\n") == 1


def test_missing_data_is_one_line(file: Write, call: Call, tmp_path: Path) -> None:
    exit_code, _, err = call("run", file(**{"data.dir": str(tmp_path / "nothing")}))
    assert exit_code == 2
    assert err.startswith("error E-DATA-MISSING: ")
    assert err.count("\n") == 1


def test_an_error_of_the_data_package_is_one_line_too(file: Write, call: Call) -> None:
    exit_code, _, err = call("run", file(**{"data.text": "/no/such/text"}))
    assert exit_code == 2
    assert err.startswith("error E-SOURCE-MISSING: ")
    assert err.count("\n") == 1


def test_the_schema_is_printed_whole() -> None:
    result = CliRunner().invoke(app, ["validate", "--schema"])
    assert result.exit_code == 0
    assert "model.moe.top_k (int; required)" in result.output
    assert "checkpoint.keep (int; 2)" in result.output


def test_a_run_reports_its_loss_beside_a_unigram_model(
    file: Write, call: Call, tmp_path: Path
) -> None:
    exit_code, out, err = call("run", file(**{"train.steps": 2}))
    assert (exit_code, err) == (0, "")
    assert "step 2/2" in out
    assert "validation loss " in out
    assert "(unigram " in out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "completed"


@pytest.mark.parametrize("name", ["12", "true", "a = [b]", 'a "b" \\c', "é🙂"])
def test_a_folder_may_be_called_like_a_value_of_toml(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, _, err = call("quickstart", "--out", name, "--text", name)
    assert exit_code == 2
    assert err.startswith(f"error E-SOURCE-MISSING: there is no file or folder {name};")
    assert [path.name for path in tmp_path.iterdir()] in ([name], [])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_run_and_ends_with_its_number(
    file: Write,
    fork: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    path = file(**{"train.steps": 100_000, "checkpoint.every": 50_000})
    monkeypatch.setattr(sys, "argv", ["nmoe-train", "run", str(path)])
    child = fork(main)
    live = tmp_path / "run" / "metrics" / "1-0.jsonl"
    child.wait_until(lambda: live.exists() and live.stat().st_size > 0)
    os.kill(child.pid, number)
    exit_code, out, err = child.wait()
    assert exit_code == code, err
    assert err == "interrupted\n"
    assert "finishing this step, then saving" in out
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted"
    saved = tmp_path / "run" / "checkpoints" / f"step-{record['step']:08d}" / "COMPLETE"
    assert saved.exists()
    assert f"saved at step {record['step']}" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("hook", ["preparation", "step"])
def test_a_signal_that_stops_at_once_ends_with_its_number_too(
    file: Write,
    fork: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    hook: str,
    number: signal.Signals,
    code: int,
) -> None:
    from nmoe_train.console import ConsoleObserver

    (tmp_path / "text.txt").write_text("some text\n" * 2000)
    overrides = {"data.text": str(tmp_path / "text.txt"), "data.tokenizer": "bytes"}
    path = file(**overrides, **{"data.dir": str(tmp_path / "data")})
    monkeypatch.setattr(sys, "argv", ["nmoe-train", "run", str(path)])
    # The making of shards stops at the first one, the training at the second.
    times = 2 if hook == "step" else 1

    def stop(*_: object) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    def interrupted() -> None:
        setattr(ConsoleObserver, hook, stop)
        main()

    exit_code, out, err = fork(interrupted).wait()
    assert exit_code == code, err
    assert err == "interrupted\n"
    assert "the same command goes on from what was saved" in out
    saved = tmp_path / "run" / "run.json"
    assert saved.exists() == (hook == "step")
    if saved.exists():
        assert json.loads(saved.read_text())["status"] == "interrupted"
    assert fork(main).wait()[0] == 0, "the same command goes on"


def test_the_version_is_that_of_the_package(call: Call) -> None:
    version = importlib.metadata.version("nmoe-train")
    assert call("--version") == (0, f"{version}\n", "")


def test_an_interrupt_outside_training_is_one_line(
    call: Call, monkeypatch: pytest.MonkeyPatch, file: Write
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nmoe_train.parallel.check_layout", interrupted)
    exit_code, out, err = call("validate", file())
    assert (exit_code, out, err) == (130, "", "interrupted\n")


def test_checkpoints_are_listed_and_a_damaged_file_is_named(call: Call, tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    meta = {"tokens": 1280, "layout": {"dp": 2, "ep": 1}}
    for step in (2, 4):
        write_checkpoint(root, step, {"model.a": torch.ones(3)}, meta, keep=2)
    (root / "step-00000006").mkdir()
    code, out, err = call("checkpoint", "ls", root.parent)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 6", "unfinished"],
        ["step 4", "complete"],
        ["step 2", "complete"],
    ]
    assert "1,280 tokens  dp=2 ep=1" in lines[1] and "3 files" in lines[1]

    code, out, err = call("checkpoint", "verify", root.parent)
    assert (code, out.splitlines(), err) == (
        0,
        ["step-00000004: sound", "step-00000002: sound"],
        "",
    )
    damaged = root / "step-00000002" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    code, out, err = call("checkpoint", "verify", root.parent)
    assert (code, out.splitlines()[1]) == (2, "step-00000002: damaged")
    assert str(damaged) in err and "E-CHECKPOINT-CORRUPT" in err and err.count("\n") == 1
    assert call("checkpoint", "verify", root / "step-00000004")[0] == 0
    code, _, err = call("checkpoint", "verify", root / "step-00000002")
    assert code == 2 and str(damaged) in err
    (root / "step-00000004" / "meta.json").write_text("{}")
    code, out, _ = call("checkpoint", "ls", root.parent)
    assert (code, out.splitlines()[1].split("  ")[1]) == (0, "damaged")
    assert call("checkpoint", "verify", root / "step-00000004")[0] == 2


def test_a_checkpoint_of_another_format_is_not_called_damaged(call: Call, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 2, {"model.a": torch.ones(3)}, {}, keep=1)
    meta = json.loads((folder / "meta.json").read_text())
    content = json.dumps(meta | {"schema_version": 2}).encode()
    (folder / "meta.json").write_bytes(content)
    (folder / "COMPLETE").write_text(hashlib.sha256(content).hexdigest())
    code, out, err = call("checkpoint", "ls", tmp_path)
    assert (code, out.split("  ")[1], err) == (0, "other format", "")
    write_checkpoint(tmp_path, 1, {"model.a": torch.ones(3)}, {}, keep=2)
    code, verified, of_verify = call("checkpoint", "verify", tmp_path)
    assert (code, verified) == (2, "step-00000002: other format\nstep-00000001: sound\n")
    code, converted, of_convert = call("checkpoint", "convert", folder, tmp_path / "new")
    assert (code, converted) == (2, "")
    for err in (of_verify, of_convert):
        assert "E-CHECKPOINT-VERSION" in err and "format 2" in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_listing_and_verifying_do_without_torch(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2, {"model.a": torch.ones(3)}, {}, keep=1)
    for command in ("ls", "verify"):
        program = (
            "import sys; from nmoe_train.cli import app\n"
            f"app(['checkpoint', '{command}', {str(tmp_path)!r}], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


def test_checkpoints_at_a_url_are_listed_and_verified(
    call: Call, bucket: Bucket, tmp_path: Path
) -> None:
    url = f"s3://{NAME}/runs"
    meta = {"tokens": 1280, "layout": {"dp": 2, "ep": 1}}
    there = Mirror(Target(f"{url}/run/checkpoints", 60.0))
    for step in (2, 4):
        folder = write_checkpoint(tmp_path, step, {"model.a": torch.ones(3)}, meta, keep=2)
        there.upload(folder, lambda sent: None)
    bucket.put("runs/run/checkpoints/step-00000006/rank-00000.safetensors", b"half")
    for place in (f"{url}/run", f"{url}/run/checkpoints"):
        code, out, err = call("checkpoint", "ls", place)
        assert (code, err) == (0, "")
        assert [line.split("  ")[:2] for line in out.splitlines()] == [
            ["step 6", "unfinished"],
            ["step 4", "complete"],
            ["step 2", "complete"],
        ]
    assert "3 files" in out and "1,280 tokens  dp=2 ep=1" in out
    code, out, err = call("checkpoint", "verify", f"{url}/run")
    assert (code, out.splitlines(), err) == (
        0,
        ["step-00000004: sound", "step-00000002: sound"],
        "",
    )
    bucket.put("runs/run/checkpoints/step-00000002/rank-00000.safetensors", b"damaged")
    code, out, err = call("checkpoint", "verify", f"{url}/run/checkpoints/step-00000002")
    assert (code, out) == (2, "step-00000002: damaged\n")
    assert "E-CHECKPOINT-CORRUPT" in err and err.count("\n") == 1
    code, out, err = call("checkpoint", "ls", f"{url}/absent")
    assert code == 2 and "E-CHECKPOINT-NOT-FOUND" in err


def test_a_checkpoint_at_a_url_is_converted(call: Call, bucket: Bucket, tmp_path: Path) -> None:
    url = f"s3://{NAME}/runs/run"
    there = Mirror(Target(f"{url}/checkpoints", 60.0))
    for step in (2, 4):
        state = {"model.a": torch.full((3,), float(step))}
        folder = write_checkpoint(tmp_path / "here", step, state, {}, keep=2)
        there.upload(folder, lambda sent: None)
    new = tmp_path / "new"
    code, out, err = call("checkpoint", "convert", url, new)
    assert (code, err) == (0, f"fetching step-00000004 from {url}/checkpoints\n")
    assert out.startswith(f"{new}/checkpoints/step-00000004  ")
    assert [path.name for path in new.iterdir()] == ["checkpoints"]
    weights = tmp_path / "weights"
    words = (f"{url}/checkpoints/step-00000002", weights, "--weights-only")
    code, out, _ = call("checkpoint", "convert", *words)
    assert code == 0 and out.startswith(f"{weights}/weights-00001-of-00001.safetensors  ")
    assert load_file(weights / "weights-00001-of-00001.safetensors")["a"].tolist() == [2.0] * 3
    bucket.put("runs/run/checkpoints/step-00000004/rank-00000.safetensors", b"damaged")
    for source, said in ((url, "`nmoe-train checkpoint verify`"), (f"{url}s", "no checkpoint in")):
        code, out, err = call("checkpoint", "convert", source, tmp_path / "deep" / "other")
        assert (code, out) == (2, "") and said in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "new", "weights"]


def test_where_there_is_no_checkpoint_it_is_said(call: Call, tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    assert "unfinished" in call("checkpoint", "ls", tmp_path)[1]
    for command, place in (("ls", tmp_path / "absent"), ("verify", tmp_path)):
        code, out, err = call("checkpoint", command, place)
        assert (code, out) == (2, "")
        assert "E-CHECKPOINT-NOT-FOUND" in err and str(place) in err
