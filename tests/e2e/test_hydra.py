"""HYDRA as a user runs it: a judge on loopback with a hidden rule, real text, one command each."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_server import Behaviour, JudgeServer, hidden_scores, random_scores
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.heads import open_heads
from nmoe_data.hydra.labels import read_labels
from real_text import stdlib_pieces
from scipy.stats import spearmanr

NAMES = ("helpfulness", "correctness", "coherence", "complexity", "density")
# What the heads shall reach on the test part, and the chance that the judge is one off.
LEAST_RHO = 0.85
NOISE = 0.1


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(Behaviour(noise=NOISE)) as running:
        yield running


def hydra(*arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    """Run `nmoe-data hydra ARGUMENTS...`; its exit code is for the test to judge."""
    command = [sys.executable, "-m", "nmoe_data", "hydra", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def corpus(path: Path, count: int) -> Path:
    lines = (json.dumps({"text": text}) + "\n" for text in stdlib_pieces()[:count])
    path.write_text("".join(lines))
    return path


def label(source: Path, out: Path, server: JudgeServer) -> subprocess.CompletedProcess[str]:
    place = ("--model", "m", "--base-url", server.base_url, "--no-key", "--rubric", "code")
    return hydra("label", source, "--out", out, "--sample", 10_000, *place)


@pytest.mark.slow
def test_heads_recover_the_rule_of_the_judge(server: JudgeServer, tmp_path: Path) -> None:
    source = corpus(tmp_path / "web.jsonl", 1600)
    labels, heads = tmp_path / "LABELS", tmp_path / "HEADS"
    assert label(source, labels, server).returncode == 0
    trained = hydra("train", labels, "--out", heads)
    assert trained.returncode == 0, trained.stderr
    metrics = json.loads((heads / "head.json").read_text())["metrics"]["test"]
    for head in ("probe", "judge"):
        found = [metrics[head][name]["spearman"] for name in NAMES]
        assert min(one["value"] for one in found) >= LEAST_RHO, found
        for one in found:
            assert f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" in trained.stdout
    # Against the rule itself, on text that no judge has seen: not only the noise was learned.
    unseen = list(stdlib_pieces()[2000:2400])
    opened, encoder = open_heads(heads), open_encoder("hashed")
    scores = opened.judge_scores(encoder.encode(unseen))
    truth = [hidden_scores(text) for text in unseen]
    for at in range(len(NAMES)):
        assert spearmanr(scores[:, at], [row[at] for row in truth]).statistic >= LEAST_RHO
    calibrated = hydra("calibrate", heads, labels, "--target-keep", 0.3)
    assert calibrated.returncode == 0, calibrated.stderr
    calibration = open_heads(heads).calibration
    assert calibration is not None
    quality = calibration.quality(scores)
    # Of unseen documents about as many are kept as were asked for: three sigma of 240 and 400.
    assert (quality >= calibration.tau_keep).mean() == pytest.approx(0.25, abs=0.12)
    assert (quality >= calibration.tau_drop).mean() == pytest.approx(0.35, abs=0.12)
    assert len(read_labels(labels).models) == 1


@pytest.mark.slow
def test_without_a_signal_the_commands_say_that_there_is_no_agreement(
    server: JudgeServer, tmp_path: Path
) -> None:
    server.behaviour.rule = random_scores
    source = corpus(tmp_path / "web.jsonl", 400)
    labels, heads = tmp_path / "LABELS", tmp_path / "HEADS"
    assert label(source, labels, server).returncode == 0
    trained = hydra("train", labels, "--out", heads)
    assert trained.returncode == 0
    assert trained.stderr.splitlines()[-1].startswith("no agreement")
    calibrated = hydra("calibrate", heads, labels)
    assert calibrated.returncode == 2
    assert calibrated.stderr.startswith("error E-HYDRA-NO-AGREEMENT")
