"""Heads for the tests of filter and report: random but fixed weights on the bundled encoder."""

from pathlib import Path

import numpy as np
from nmoe_data.hydra.calibrate import Calibration
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.heads import Heads, PooledJudge, Probe, save_heads
from nmoe_data.hydra.rubric import load_rubric

PROJECTED = 16


def make_heads(
    folder: Path,
    texts: list[str],
    *,
    judge: bool = True,
    calibrated: bool = True,
    seed: int = 0,
    share: tuple[float, float] = (0.3, 0.7),
) -> Heads:
    """Write heads whose thresholds are the quantiles `share` of their quality on `texts`."""
    draw = np.random.default_rng(seed)
    encoder = open_encoder("hashed")
    features = encoder.encode(texts)
    rubric = load_rubric("prose")
    names = len(rubric.names)
    probe = _probe(draw, features, names)
    weights = tuple([1 / names] * names)
    heads = Heads(
        rubric=rubric,
        encoder_spec="hashed",
        encoder_hash=encoder.hash,
        encoder_width=encoder.width,
        probe=probe,
        judge=_judge(draw, features, names) if judge else None,
    )
    if calibrated:
        quality = np.sort(Calibration(weights, 0.0, 1.0).quality(heads.probe_scores(features)))
        # Between two documents, so that rounding decides about none.
        middles = (quality[1:] + quality[:-1]) / 2
        drop, keep = (float(middles[int(part * (len(middles) - 1))]) for part in share)
        heads = Heads(
            rubric=heads.rubric,
            encoder_spec=heads.encoder_spec,
            encoder_hash=heads.encoder_hash,
            encoder_width=heads.encoder_width,
            probe=heads.probe,
            judge=heads.judge,
            calibration=Calibration(weights, drop, keep),
        )
    return save_heads(folder, heads)


def _probe(draw: np.random.Generator, features: object, names: int) -> Probe:
    weight = draw.normal(size=(features.shape[1], names)).astype(np.float32)
    scores = np.asarray(features @ weight)
    weight = (weight / scores.std(axis=0)).astype(np.float32)
    bias = (2.5 - np.asarray(features @ weight).mean(axis=0)).astype(np.float32)
    return Probe(weight, bias)


def _judge(draw: np.random.Generator, features: object, names: int) -> PooledJudge:
    projection = draw.normal(size=(features.shape[1], PROJECTED)).astype(np.float32)
    projected = np.asarray(features @ projection)
    layer = draw.normal(size=(PROJECTED, names)).astype(np.float32) / np.sqrt(PROJECTED)
    return PooledJudge(
        projection,
        projected.mean(axis=0).astype(np.float32),
        projected.std(axis=0).astype(np.float32) + np.float32(1e-6),
        ((layer.astype(np.float32), np.zeros(names, np.float32)),),
    )
