"""The command: what it prints, how it fails, and that it starts without loading everything."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nmoe_data
import pytest
from nmoe_data import console
from nmoe_data.tokenizer import load_tokenizer


@pytest.fixture
def out(tmp_path: Path, make_texts, write_jsonl, run_cli) -> Path:
    write_jsonl(tmp_path / "in" / "a.jsonl", make_texts(200))
    done = run_cli(
        "prep",
        tmp_path / "in",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bpe:300",
        "--held-out",
        "0.2",
        "--shard-tokens",
        "1000",
    )
    assert done.code == 0
    return tmp_path / "out"


def test_verify_passes_a_whole_run_and_names_a_corrupt_shard(out: Path, run_cli) -> None:
    good = run_cli("verify", out)
    assert good.code == 0
    assert good.out.count(", whole") == 2
    shard = out / "train" / "shard-00002.npy"
    data = bytearray(shard.read_bytes())
    data[500] ^= 4
    shard.write_bytes(data)
    bad = run_cli("verify", out)
    assert bad.code == 2
    assert bad.err.startswith("error E-SHARD-CHECKSUM")
    assert "train/shard-00002.npy" in bad.err
    assert "held-out" in bad.out
    assert run_cli("verify", out / "held-out").code == 0


def test_info_agrees_with_the_manifests(out: Path, run_cli) -> None:
    manifests = json.loads(run_cli("info", out, "--json").out)
    for split in ("train", "held-out"):
        written = json.loads((out / split / "manifest.json").read_text())
        assert manifests[str(out / split)] == written
        assert f"{written['tokens']:,} (uint16)" in run_cli("info", out).out


def test_inspect_prints_the_document_and_its_origin(out: Path, run_cli, make_texts) -> None:
    documents = json.loads(run_cli("info", out, "--json").out)[str(out / "train")]["documents"]
    texts = make_texts(200)
    found = [run_cli("inspect", out, "--document", n) for n in (0, documents - 1)]
    assert all(one.out.removesuffix("\n") in texts for one in found)
    assert texts.index(found[0].out.removesuffix("\n")) < 10
    assert "in/a.jsonl, record at " in found[1].err
    line_start = int(found[1].err.split("record at ")[1].split(",")[0])
    line = (out.parent / "in" / "a.jsonl").read_bytes()[line_start:].split(b"\n")[0]
    assert json.loads(line)["text"] == found[1].out.removesuffix("\n")
    for number in (documents, -1):
        missing = run_cli("inspect", out, "--document", number)
        assert (missing.code, missing.err.split(":")[0]) == (2, "error E-DOCUMENT-NUMBER")


def test_inspect_refuses_another_tokenizer(out: Path, run_cli) -> None:
    load_tokenizer("bytes").save(out / "tokenizer.json")
    assert run_cli("inspect", out).err.startswith("error E-TOKENIZER-DRIFT")


def test_a_tokenizer_is_trained_and_used(out: Path, run_cli) -> None:
    path = out.parent / "t.json"
    done = run_cli("tokenizer", "train", out.parent / "in", "--vocab-size", 280, "--out", path)
    assert done.code == 0
    assert load_tokenizer(path).vocab_size == 280
    again = run_cli("prep", out.parent / "in", "--out", out.parent / "o2", "--tokenizer", path)
    assert again.code == 0


def test_a_second_run_says_that_nothing_was_to_do(out: Path, run_cli) -> None:
    done = run_cli(
        "prep",
        out.parent / "in",
        "--out",
        out,
        "--tokenizer",
        "bpe:300",
        "--held-out",
        "0.2",
        "--shard-tokens",
        "1000",
    )
    assert (done.code, done.out.split(":")[0]) == (0, "already prepared")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda folder: None, "E-SOURCE-MISSING"),
        (lambda folder: folder.mkdir(), "E-SOURCE-EMPTY"),
        (lambda folder: folder.write_bytes(b"\0" * 100), "E-NO-TEXT"),
        (lambda folder: folder.write_bytes(b""), "E-NO-TEXT"),
    ],
    ids=["missing", "empty folder", "NUL bytes", "empty file"],
)
def test_a_wrong_source_is_one_line_and_exit_2(make, code: str, tmp_path: Path, run_cli) -> None:
    make(tmp_path / "in")
    done = run_cli("prep", tmp_path / "in", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert done.code == 2
    assert done.err.startswith(f"error {code}: ")
    assert done.err.count("\n") == 1
    assert done.out == ""


@pytest.mark.parametrize("command", ["verify", "info", "inspect"])
def test_a_folder_that_is_no_dataset_is_one_line(command: str, tmp_path: Path, run_cli) -> None:
    done = run_cli(command, tmp_path / "nothing")
    assert (done.code, done.err.split(":")[0]) == (2, "error E-DATASET-MISSING")
    (tmp_path / "state.json").write_text("{}")
    assert run_cli(command, tmp_path).err.startswith("error E-DATASET-UNFINISHED")


@pytest.mark.parametrize("command", ["verify", "info", "inspect"])
def test_a_manifest_that_cannot_be_read_is_one_line(command: str, out: Path, run_cli) -> None:
    manifest = out / "train" / "manifest.json"
    if os.geteuid() == 0:
        # Permissions do not stop root; this file can be opened but its start cannot be read.
        manifest.unlink()
        manifest.symlink_to("/proc/self/mem")
    else:
        manifest.chmod(0)
    done = run_cli(command, out)
    assert done.code == 2
    assert re.match(rf"error E-(IO|PERMISSION): cannot read {manifest}: ", done.err)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["verify", "info", "inspect"])
def test_a_name_that_the_system_refuses_is_one_line(command: str, tmp_path: Path, run_cli) -> None:
    done = run_cli(command, tmp_path / ("x" * 300))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("error E-")


def test_the_version_is_shown(run_cli) -> None:
    done = run_cli("--version")
    assert (done.code, done.out) == (0, nmoe_data.__version__ + "\n")


def test_without_a_terminal_progress_is_plain_lines(
    tmp_path: Path, make_texts, write_jsonl, run_cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    arguments = ("prep", source, "--tokenizer", "bytes", "--out")
    assert run_cli(*arguments, tmp_path / "quick").err == ""
    monkeypatch.setattr(console, "PLAIN_LINE_SECONDS", 0.0)
    lines = run_cli(*arguments, tmp_path / "out").err.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"\d+%  [\d,]+ tokens, 0 rejected", line) for line in lines)
    assert lines[-1].startswith("100%  ")


def test_a_reader_that_goes_away_is_no_traceback(out: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nmoe_data", "info", str(out)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_loads_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys; sys.argv = ['nmoe-data', '--help']\n"
        "from nmoe_data.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'pyarrow', 'tokenizers', 'zstandard', 'torch'} & set(sys.modules)))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert "prep" in printed
    assert printed.splitlines()[-1] == "[]"


def test_nothing_in_the_package_needs_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import nmoe_data.cli, nmoe_data.prep, nmoe_data.stats, nmoe_data.inspect"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
