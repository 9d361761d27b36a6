"""`hydra train` and `hydra calibrate` as a user runs them, on labels by a known rule."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hydra_labels import noisy, write_label_folder
from judge_server import hidden_scores, random_scores
from nmoe_data.errors import DataError
from nmoe_data.hydra.calibrated import held_out_scores
from nmoe_data.hydra.documents import document_id, split_of
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.heads import open_heads
from nmoe_data.hydra.labels import DOCUMENTS_NAME, LABELS_NAME, Labels, read_labels
from nmoe_data.hydra.train import TrainSettings, train_heads
from real_text import stdlib_pieces
from scipy.stats import spearmanr
from tiny_models import write_bert

NAMES = ("helpfulness", "correctness", "coherence", "complexity", "density")


def pieces(count: int) -> list[str]:
    return list(stdlib_pieces()[:count])


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rule") / "LABELS"
    write_label_folder(folder, pieces(700), {"m": noisy(hidden_scores)})
    return folder


@pytest.fixture(scope="module")
def random_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "LABELS"
    write_label_folder(folder, pieces(300), {"m": random_scores})
    return folder


@pytest.fixture(scope="module")
def trained(labels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the rule; tests that change them take a copy."""
    out = tmp_path_factory.mktemp("heads") / "HEADS"
    train_heads(read_labels(labels), open_encoder("hashed"), out, TrainSettings())
    return out


@pytest.fixture
def heads(trained: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "HEADS"
    copy.mkdir()
    for file in trained.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def head_json(folder: Path) -> dict:
    return json.loads((folder / "head.json").read_text())


def test_heads_recover_the_rule_and_say_how_well(
    run_cli: Callable, labels: Path, tmp_path: Path, tree: Callable
) -> None:
    out = tmp_path / "HEADS"
    end = run_cli("hydra", "train", labels, "--out", out)
    assert end.code == 0, end.err
    content = head_json(out)
    assert content["encoder"]["spec"] == "hashed"
    assert content["rubric"]["dimensions"] == list(NAMES)
    counts = content["documents"]
    splits = [split_of(document_id(text)) for text in pieces(700)]
    assert counts == {name: splits.count(name) for name in ("train", "validation", "test")}
    # What the file says is what an independent look at the test part finds.
    found = open_heads(out)
    scored = read_labels(labels).scores()
    test = [row for row, split in enumerate(scored.splits) if split == "test"]
    features = open_encoder("hashed").encode([scored.texts[row] for row in test])
    for head, scores in (
        ("probe", found.probe_scores(features)),
        ("judge", found.judge_scores(features)),
    ):
        for at, name in enumerate(NAMES):
            told = content["metrics"]["test"][head][name]["spearman"]
            rho = spearmanr(scores[:, at], scored.scores[test, at]).statistic
            assert told["value"] == pytest.approx(rho, abs=1e-6)
            assert told["low"] < rho < told["high"] and rho > 0.75
            assert f"{told['value']:.3f} [{told['low']:.3f}, {told['high']:.3f}]" in end.out
    assert "no agreement" not in end.err
    # The same command again gives the same bytes.
    before = tree(out)
    assert run_cli("hydra", "train", labels, "--out", out).code == 0
    assert tree(out) == before
    assert run_cli("hydra", "train", labels, "--out", out, "--seed", 1).code == 0
    assert tree(out)["probe.safetensors"] == before["probe.safetensors"]
    assert tree(out)["head.json"] != before["head.json"]


def test_random_labels_end_in_no_agreement_and_no_calibration(
    run_cli: Callable, random_labels: Path, tmp_path: Path
) -> None:
    out = tmp_path / "HEADS"
    end = run_cli("hydra", "train", random_labels, "--out", out)
    assert end.code == 0
    assert end.err.splitlines()[-1].startswith("no agreement")
    refused = run_cli("hydra", "calibrate", out, random_labels)
    assert refused.code == 2 and head_json(out)["calibration"] is None
    (line,) = refused.err.splitlines()
    assert line.startswith("error E-HYDRA-NO-AGREEMENT") and "--force" in line
    forced = run_cli("hydra", "calibrate", out, random_labels, "--force")
    assert forced.code == 0 and head_json(out)["calibration"]["forced"]
    assert "forced" in forced.err


def test_test_labels_change_the_metrics_and_nothing_else(labels: Path, tmp_path: Path) -> None:
    def altered(split: str) -> Labels:
        copy = tmp_path / f"LABELS-{split}"
        copy.mkdir()
        for file in labels.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        chosen = {
            row["id"]
            for row in pq.read_table(copy / DOCUMENTS_NAME).to_pylist()
            if row["split"] == split
        }
        table = pq.read_table(copy / LABELS_NAME)
        rows = [
            {**row, "scores": [5 - score for score in row["scores"]]}
            if row["document_id"] in chosen
            else row
            for row in table.to_pylist()
        ]
        pq.write_table(type(table).from_pylist(rows, table.schema), copy / LABELS_NAME)
        return read_labels(copy)

    encoder = open_encoder("hashed")
    plain, test, train = (
        train_heads(part, encoder, tmp_path / f"H-{name}", TrainSettings())
        for name, part in (
            ("plain", read_labels(labels)),
            ("test", altered("test")),
            ("train", altered("train")),
        )
    )
    assert (plain.probe.weight == test.probe.weight).all()
    judges = [
        (tmp_path / f"H-{name}" / "judge.safetensors").read_bytes() for name in ("plain", "test")
    ]
    assert judges[0] == judges[1]
    assert plain.info["metrics"]["validation"] == test.info["metrics"]["validation"]
    for name in NAMES:
        values = [
            part.info["metrics"]["test"]["probe"][name]["spearman"]["value"]
            for part in (plain, test)
        ]
        assert values[0] == pytest.approx(-values[1])
    assert (plain.probe.weight != train.probe.weight).any()


def test_heads_of_one_judge_or_of_the_mean_of_all(run_cli: Callable, tmp_path: Path) -> None:
    def high(text: str) -> tuple[int, ...]:
        return (5,) * 5

    folder = tmp_path / "LABELS"
    write_label_folder(folder, pieces(300), {"low": hidden_scores, "high": high})
    for name, options in (("all", ()), ("low", ("--model", "low")), ("high", ("--model", "high"))):
        end = run_cli(
            "hydra", "train", folder, "--out", tmp_path / name, "--heads", "probe", *options
        )
        assert end.code == 0, end.err
    features = open_encoder("hashed").encode(pieces(50))
    scores = {
        name: open_heads(tmp_path / name).probe_scores(features).mean()
        for name in ("all", "low", "high")
    }
    assert scores["high"] == pytest.approx(5) and scores["low"] < 3.5
    assert scores["all"] == pytest.approx((scores["low"] + 5) / 2, abs=0.2)
    assert not (tmp_path / "all" / "judge.safetensors").exists()
    spearman = head_json(tmp_path / "high")["metrics"]["test"]["probe"]["density"]["spearman"]
    assert spearman["value"] is None and "equal" in spearman["reason"]
    # Heads of one judge are calibrated on that judge's labels.
    opened, all_labels = open_heads(tmp_path / "low"), read_labels(folder)
    held_out = held_out_scores(opened, all_labels, open_encoder("hashed"))
    own = all_labels.scores("low")
    chosen = [row for row, split in enumerate(own.splits) if split == "validation"]
    assert (held_out.labels == own.scores[chosen]).all()
    missing = run_cli("hydra", "train", folder, "--out", tmp_path / "x", "--model", "none")
    assert missing.code == 2 and "no labels of none" in missing.err


def test_calibration_is_written_and_printed(run_cli: Callable, labels: Path, heads: Path) -> None:
    end = run_cli("hydra", "calibrate", heads, labels)
    assert end.code == 0, end.err
    found = open_heads(heads).calibration
    assert found is not None and found.target == {"keep": 0.5, "band": 0.1}
    for name, value in (("tau_drop", found.tau_drop), ("tau_keep", found.tau_keep)):
        assert f"{name}  {value:.3f} [" in end.out
    assert "{:.3f} [{:.3f}, {:.3f}]".format(*found.agreement) in end.out
    assert found.tau_drop < found.tau_keep and not found.forced
    # The heads are the same ones, and a second calibration replaces the first.
    probe = (heads / "probe.safetensors").read_bytes()
    options = ("--target-precision", 0.7, "--good", 0.5, "--band", 0.2, "--by-domain")
    weights = "density=3,helpfulness=1"
    again = run_cli("hydra", "calibrate", heads, labels, *options, "--weights", weights)
    assert again.code == 0, again.err
    other = open_heads(heads).calibration
    assert other is not None and other.target == {"precision": 0.7, "band": 0.2}
    assert other.weights == (0.25, 0, 0, 0, 0.75) and other.good == 0.5
    assert set(other.domains) == {"pieces"} or "pieces has" in again.out
    assert (heads / "probe.safetensors").read_bytes() == probe


def test_labels_by_another_rubric_are_refused(
    run_cli: Callable, heads: Path, tmp_path: Path
) -> None:
    write_label_folder(tmp_path / "code", pieces(60), {"m": hidden_scores}, rubric="code")
    end = run_cli("hydra", "calibrate", heads, tmp_path / "code")
    assert end.code == 2 and "E-HYDRA-RUBRIC" in end.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "{labels}", "--out", "{labels}"), "E-OUT-NOT-EMPTY"),
        (("train", "{few}", "--out", "{out}"), "E-HYDRA-TOO-FEW"),
        (("train", "{out}", "--out", "{out}"), "E-HYDRA-LABELS"),
        (("train", "{labels}", "--out", "{out}", "--encoder", "nothing"), "E-HYDRA-ENCODER"),
        (("train", "{labels}", "--out", "{out}", "--heads", "judge"), "E-ARGUMENT"),
        (("train", "{labels}", "--out", "{out}", "--judge", "forest"), "E-ARGUMENT"),
        (("train", "{labels}", "--out", "{out}", "--judge", "transformer"), "no token states"),
        (("calibrate", "{out}", "{labels}"), "E-HYDRA-HEADS"),
        (("calibrate", "{heads}", "{few}"), "E-HYDRA-TOO-FEW"),
        (("calibrate", "{heads}", "{labels}", "--weights", "beauty=1"), "names beauty"),
        (("calibrate", "{heads}", "{labels}", "--weights", "density=x"), "E-ARGUMENT"),
        (("calibrate", "{heads}", "{labels}", "--weights", "density,coherence=1"), "names density"),
        (("calibrate", "{heads}", "{labels}", "--target-keep", "1.5"), "E-ARGUMENT"),
        (
            ("calibrate", "{heads}", "{labels}", "--target-keep", ".5", "--target-precision", ".5"),
            "E-ARGUMENT",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_2(
    run_cli: Callable,
    labels: Path,
    heads: Path,
    tmp_path: Path,
    tree: Callable,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    write_label_folder(tmp_path / "few", pieces(12), {"m": hidden_scores})
    places = {"labels": labels, "heads": heads, "few": tmp_path / "few", "out": tmp_path / "out"}
    before = tree(heads)
    end = run_cli("hydra", *(argument.format(**places) for argument in arguments))
    assert end.code == 2
    (line,) = end.err.splitlines()
    assert line.startswith("error E-") and words in line
    assert not (tmp_path / "out").exists() and tree(heads) == before


def test_a_place_that_cannot_hold_heads_is_refused_before_anything_is_encoded(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = open_encoder("hashed")

    def encode(self: object, texts: list[str]) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(type(encoder), "encode", encode)
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(DataError, match="E-NOT-A-FOLDER"):
            train_heads(read_labels(labels), encoder, tmp_path / name, TrainSettings())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match=f"E-PERMISSION: .* {tmp_path}:"):
        train_heads(read_labels(labels), encoder, tmp_path / "new", TrainSettings())


def test_ctrl_c_stops_a_training_and_leaves_no_heads(labels: Path, tmp_path: Path) -> None:
    out = tmp_path / "HEADS"
    # The signal comes as soon as the training has said where it is.
    program = """
import os, signal
import nmoe_data.hydra.train as heads
from nmoe_data.cli import main

train_heads = heads.train_heads

def interrupted(labels, encoder, out, settings, progress):
    signals = iter([signal.SIGINT])

    def report(now):
        for number in signals:
            os.kill(os.getpid(), number)
        progress(now)

    return train_heads(labels, encoder, out, settings, report)

heads.train_heads = interrupted
main()
"""
    command = [sys.executable, "-c", program, "hydra", "train", str(labels), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()


def test_a_neural_encoder_keeps_its_embeddings_and_a_transformer_reads_tokens(
    run_cli: Callable, tmp_path: Path
) -> None:
    tiny_bert = write_bert(tmp_path / "bert")
    folder = tmp_path / "LABELS"
    write_label_folder(folder, pieces(140), {"m": noisy(hidden_scores)})
    spec = f"hf:{tiny_bert}"
    options = ("--encoder", spec, "--judge", "transformer", "--max-tokens", 32)
    end = run_cli("hydra", "train", folder, "--out", tmp_path / "H", *options)
    assert end.code == 0, end.err
    encoder = open_encoder(spec)
    (cache,) = (folder / "embeddings").iterdir()
    assert cache.name == f"{encoder.hash[:32]}-float32" and any(cache.iterdir())
    content = head_json(tmp_path / "H")
    assert content["judge"]["kind"] == "transformer" and content["judge"]["max_tokens"] == 32
    assert content["encoder"] == {"spec": spec, "hash": encoder.hash, "width": 32}
    done = run_cli("hydra", "calibrate", tmp_path / "H", folder, "--force")
    assert done.code == 0, done.err
    texts = pieces(5)
    heads = open_heads(tmp_path / "H")
    scores = heads.judge_texts(encoder, texts, encoder.encode(texts))
    alone = [heads.judge_texts(encoder, [text], encoder.encode([text]))[0] for text in texts]
    np.testing.assert_allclose(scores, alone, atol=1e-4)
    # Weights of another model under the same name are noticed.
    data = bytearray((tiny_bert / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tiny_bert / "model.safetensors").write_bytes(bytes(data))
    refused = run_cli("hydra", "calibrate", tmp_path / "H", folder, "--force")
    assert refused.code == 2 and "E-HYDRA-ENCODER" in refused.err
