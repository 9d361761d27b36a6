"""Calibration: thresholds in order for any target, and what they do on held-out labels."""

import math
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_data.errors import DataError
from nmoe_data.hydra import calibrate as module
from nmoe_data.hydra.agreement import resampled
from nmoe_data.hydra.calibrate import (
    Calibration,
    HeldOut,
    Target,
    calibrate,
    fit_weights,
    share_threshold,
)

NAMES = 5


def held_out(
    count: int = 600, noise: float = 0.5, seed: int = 0, judge_noise: float | None = None
) -> HeldOut:
    """Labels that share a cause, and predictions that are off by Gaussian noise."""
    draw = np.random.default_rng(seed)
    cause = draw.normal(2.5, 1.0, (count, 1))
    labels = (cause + draw.normal(0, 0.7, (count, NAMES))).round().clip(0, 5)

    def predicted(spread: float) -> np.ndarray:
        return (labels + draw.normal(0, spread, labels.shape)).clip(0, 5).astype(np.float32)

    probe = predicted(noise)
    judge = probe if judge_noise is None else predicted(judge_noise)
    weights = np.ones(count)
    return HeldOut(probe, judge, labels.astype(np.float32), weights, ["web"] * count)


@given(
    keep=st.floats(0.01, 0.99),
    band=st.floats(0, 0.99),
    noise=st.sampled_from([0.1, 1.0, 30.0]),
    judge_noise=st.sampled_from([None, 0.1, 2.0]),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_tau_drop_is_never_above_tau_keep(
    keep: float, band: float, noise: float, judge_noise: float | None, seed: int
) -> None:
    given = held_out(60, noise, seed, judge_noise)
    for target in (Target(keep=keep, band=band), Target(precision=keep, band=band, good=0.4)):
        try:
            found = calibrate(given, target, force=True)
        except DataError as error:
            assert error.code == "E-HYDRA-TARGET" and target.precision is not None
            continue
        assert 0 <= found.tau_drop <= found.tau_keep <= 1
        assert sum(found.weights) == pytest.approx(1) and min(found.weights) >= 0
        for low, high in found.intervals.values():
            assert 0 <= low <= high <= 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.randoms(),
)
def test_a_larger_share_never_has_a_larger_threshold(
    quality: list[float], one: float, other: float, draw
) -> None:
    weights = np.array([draw.uniform(0.1, 5) for _ in quality])
    less, more = sorted((one, other))
    values = np.array(quality)
    assert share_threshold(values, weights, more) <= share_threshold(values, weights, less)


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.8])
def test_target_keep_keeps_that_share_with_the_band_around_it(keep: float) -> None:
    given = held_out()
    found = calibrate(given, Target(keep=keep, band=0.1))
    quality = found.quality(given.judge)
    assert np.mean(quality >= found.tau_keep) == pytest.approx(keep - 0.05, abs=0.01)
    assert np.mean(quality >= found.tau_drop) == pytest.approx(keep + 0.05, abs=0.01)


def test_shares_are_of_the_corpus_and_not_of_the_sample() -> None:
    given = held_out()
    # Good documents are rare in the corpus: each bad one stands for nine.
    weights = np.where(given.labels.mean(axis=1) > 2.5, 1.0, 9.0)
    given = replace(given, weights=weights)
    found = calibrate(given, Target(keep=0.2, band=0.0))
    kept = found.quality(given.judge) >= found.tau_keep
    assert weights[kept].sum() / weights.sum() == pytest.approx(0.2, abs=0.01)
    assert kept.mean() > 0.35
    assert found.curve[0].share[0] == 1.0
    point = next(point for point in found.curve if point.threshold == found.tau_keep)
    assert point.share[0] == pytest.approx(weights[kept].sum() / weights.sum())
    good = given.labels.mean(axis=1) >= 3 - 1e-6
    assert point.precision[0] == pytest.approx(weights[kept & good].sum() / weights[kept].sum())
    assert point.recall[0] == pytest.approx(weights[kept & good].sum() / weights[good].sum())


def test_target_precision_takes_the_smallest_threshold_that_reaches_it() -> None:
    given = held_out(noise=1.5)
    found = calibrate(given, Target(precision=0.9, good=0.6, band=0.2))
    quality = found.quality(given.judge)
    good = given.labels.mean(axis=1) / 5 >= 0.6 - 1e-9

    def precision(threshold: float) -> float:
        return float(good[quality >= threshold].mean())

    assert precision(found.tau_keep) >= 0.9
    lower = [value for value in quality if value < found.tau_keep]
    assert all(precision(value) < 0.9 for value in lower)
    between = np.mean((quality >= found.tau_drop) & (quality < found.tau_keep))
    assert between == pytest.approx(0.2, abs=0.01)


def test_a_precision_out_of_reach_names_the_best_there_is() -> None:
    given = held_out(noise=3.0)
    given = replace(given, labels=given.labels.clip(0, 3.4))
    with pytest.raises(DataError, match=r"E-HYDRA-TARGET.*no threshold makes 99%.*the best is"):
        calibrate(given, Target(precision=0.99, good=0.6))


def test_a_precision_over_a_handful_of_documents_does_not_count() -> None:
    given = held_out(noise=1.5)
    best = np.argsort(-given.judge.mean(axis=1))[:5]
    labels = np.full_like(given.labels, 1.0)
    labels[best] = 5.0
    labels += np.random.default_rng(0).normal(0, 0.01, labels.shape).astype(np.float32)
    with pytest.raises(DataError, match="E-HYDRA-TARGET"):
        calibrate(replace(given, labels=labels), Target(precision=1.0), force=True)


def test_the_probe_drops_hardly_anything_that_the_judge_head_keeps() -> None:
    given = held_out(1000, noise=2.0, judge_noise=0.3)
    found = calibrate(given, Target(keep=0.5, band=0.0))
    kept = found.quality(given.judge) >= found.tau_keep
    lost = found.quality(given.probe)[kept] < found.tau_drop
    assert 0 < lost.mean() <= 0.01
    assert found.tau_drop < found.tau_keep - 0.05
    # Without a judge head nothing is lost between the two, and the band is as asked.
    alone = calibrate(replace(given, judge=given.probe), Target(keep=0.5, band=0.0))
    assert alone.tau_drop == alone.tau_keep


def test_weights_follow_how_well_each_dimension_is_predicted() -> None:
    draw = np.random.default_rng(0)
    labels = draw.uniform(0, 5, (2000, 3)).astype(np.float32)
    spread = np.array([0.1, 1.0, 10.0])
    predicted = (labels + draw.normal(0, spread, labels.shape)).astype(np.float32)
    weights = fit_weights(predicted, labels, np.ones(2000))
    assert weights[0] > weights[1] > weights[2] >= 0 and weights.sum() == pytest.approx(1)
    # No other weights with sum 1 are nearer.
    goal = labels.mean(axis=1)

    def error(w: np.ndarray) -> float:
        return float(np.square(predicted @ w - goal).mean())

    others = draw.dirichlet(np.ones(3), 2000)
    assert error(weights) <= min(map(error, others)) + 1e-4
    perfect = fit_weights(labels, labels, np.ones(2000))
    np.testing.assert_allclose(perfect, 1 / 3, atol=1e-3)


def test_weights_of_the_user_are_taken_for_labels_and_predictions() -> None:
    given = held_out(noise=0.8)
    found = calibrate(given, Target(keep=0.5, weights=(3.0, 0.0, 0.0, 0.0, 1.0)))
    assert found.weights == (0.75, 0.0, 0.0, 0.0, 0.25)
    good = (given.labels @ np.array(found.weights)) / 5 >= 0.6 - 1e-9
    kept = found.quality(given.judge) >= 0.5
    point = next(point for point in found.curve if point.threshold == 0.5)
    assert point.recall[0] == pytest.approx((kept & good).sum() / good.sum())
    with pytest.raises(DataError, match="2 weights for 5 dimensions"):
        calibrate(given, Target(keep=0.5, weights=(1.0, 1.0)))


def test_heads_that_do_not_agree_are_not_calibrated_unless_forced() -> None:
    given = held_out(200)
    draw = np.random.default_rng(5)
    shuffled = replace(given, labels=draw.permutation(given.labels))
    with pytest.raises(DataError, match=r"E-HYDRA-NO-AGREEMENT.*--force"):
        calibrate(shuffled, Target(keep=0.5))
    forced = calibrate(shuffled, Target(keep=0.5), force=True)
    assert forced.forced and forced.agreement[1] <= 0
    assert not calibrate(given, Target(keep=0.5), force=True).forced
    constant = replace(given, probe=given.probe * 0 + 2, judge=given.probe * 0 + 2)
    with pytest.raises(DataError, match=r"E-HYDRA-NO-AGREEMENT.*all predictions are equal"):
        calibrate(constant, Target(keep=0.5))
    opposite = replace(given, judge=5 - given.judge, probe=5 - given.probe)
    with pytest.raises(DataError, match="E-HYDRA-NO-AGREEMENT"):
        calibrate(opposite, Target(keep=0.5))


def test_a_correlation_above_zero_is_not_enough_if_its_interval_is_not() -> None:
    given = held_out(60)
    draws = (np.random.default_rng(seed) for seed in range(50))
    for draw in draws:
        luck = replace(given, labels=draw.permutation(given.labels))
        forced = calibrate(luck, Target(keep=0.5), force=True)
        value, low, _ = forced.agreement
        if value > 0 > low:
            break
    else:
        pytest.fail("no permutation with a small positive correlation")
    assert forced.forced
    with pytest.raises(DataError, match="E-HYDRA-NO-AGREEMENT"):
        calibrate(luck, Target(keep=0.5))


def test_documents_of_equal_quality_are_kept_or_left_together() -> None:
    # The good half of the tied documents comes first; alone it would reach the precision.
    quality = np.array([5.0] * 30 + [3.0] * 40 + [1.0] * 30)
    label = np.array([5.0] * 50 + [0.0] * 50)
    scores = np.repeat(quality[:, None], NAMES, axis=1).astype(np.float32)
    labels = np.repeat(label[:, None], NAMES, axis=1).astype(np.float32)
    given = HeldOut(scores, scores, labels, np.ones(100), ["web"] * 100)
    found = calibrate(given, Target(precision=0.9, band=0.0))
    assert found.tau_keep == pytest.approx(1.0)


def test_domains_have_thresholds_of_their_own_where_they_are_large_enough() -> None:
    web, code, few = held_out(300, seed=1), held_out(300, seed=2), held_out(30, seed=3)
    parts = [web, replace(code, probe=code.probe / 2, judge=code.judge / 2), few]
    names = ["web"] * 300 + ["code"] * 300 + ["few"] * 30
    joined = HeldOut(
        *(
            np.concatenate([getattr(part, field) for part in parts])
            for field in ("probe", "judge", "labels", "weights")
        ),
        names,
    )
    target = Target(keep=0.4, band=0.1, by_domain=True)
    found = calibrate(joined, target, force=True)
    assert set(found.domains) == {"web", "code"}
    assert found.thresholds("few") == found.thresholds(None) == (found.tau_drop, found.tau_keep)
    for name in ("web", "code"):
        drop, keep = found.thresholds(name)
        quality = found.quality(joined.judge)[np.array(names) == name]
        assert np.mean(quality >= keep) == pytest.approx(0.35, abs=0.02)
        assert np.mean(quality >= drop) == pytest.approx(0.45, abs=0.02)
    assert found.domains["code"][1] < found.domains["web"][1] - 0.1
    (note,) = found.notes
    assert note.startswith("few has 30 held-out documents")
    assert calibrate(joined, replace(target, by_domain=False), force=True).domains == {}


def test_a_domain_out_of_reach_of_the_precision_falls_back_and_says_so() -> None:
    web, bad = held_out(300, seed=1), held_out(150, seed=2)
    labels = np.concatenate([web.labels, bad.labels.clip(0, 2)])
    joined = HeldOut(
        np.concatenate([web.probe, bad.probe]),
        np.concatenate([web.judge, bad.judge]),
        labels,
        np.ones(450),
        ["web"] * 300 + ["bad"] * 150,
    )
    found = calibrate(joined, Target(precision=0.6, by_domain=True))
    assert set(found.domains) == {"web"}
    (note,) = found.notes
    assert note.startswith("bad uses the thresholds of all: E-HYDRA-TARGET")


def test_curve_intervals_are_percentiles_over_resampled_documents() -> None:
    weights = np.random.default_rng(0).integers(1, 9, 120)
    given = replace(held_out(120, noise=1.0), weights=weights.astype(float))
    found = calibrate(given, Target(keep=0.5), seed=4)
    quality = found.quality(given.judge)
    good = given.labels.mean(axis=1) / 5 >= 0.6 - 1e-9
    rows = [
        np.repeat(np.arange(120), m.astype(int) * weights)
        for m in np.vstack([*resampled(120, module.RESAMPLES, 4)])
    ]
    point = next(point for point in found.curve if point.threshold == 0.5)
    plain = {
        "share": [np.mean(quality[row] >= 0.5) for row in rows],
        "precision": [good[row][quality[row] >= 0.5].mean() for row in rows],
        "recall": [(quality[row] >= 0.5)[good[row]].mean() for row in rows],
    }
    for name, values in plain.items():
        low, high = np.percentile(values, [2.5, 97.5])
        assert getattr(point, name)[1:] == pytest.approx((low, high), abs=1e-9)
    assert {found.tau_drop, found.tau_keep} <= {point.threshold for point in found.curve}
    assert math.isnan(found.curve[-1].precision[0]) or found.curve[-1].share[0] > 0


def test_threshold_intervals_narrow_with_more_documents() -> None:
    narrow, wide = (
        calibrate(held_out(count), Target(keep=0.5)).intervals["tau_keep"] for count in (4000, 60)
    )
    assert 0 < narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
    assert narrow[0] <= calibrate(held_out(4000), Target(keep=0.5)).tau_keep <= narrow[1]


@pytest.mark.parametrize(
    ("count", "noise", "precision"), [(200, 1.0, 0.9), (200, 2.0, 0.99), (80, 0.3, 1.0)]
)
def test_threshold_intervals_for_a_precision_are_percentiles_over_resampled_documents(
    count: int, noise: float, precision: float
) -> None:
    given = held_out(count, noise=noise)
    target = Target(precision=precision, band=0.1)
    found = calibrate(given, target, seed=4)
    quality = found.quality(given.judge)
    good = given.labels.mean(axis=1) / 5 >= target.good - 1e-9

    def smallest(rows: np.ndarray) -> float:
        """Look at every threshold that keeps at least 20 of the drawn documents."""
        reached = [1.0]
        for threshold in set(quality[rows].tolist()):
            kept = rows[quality[rows] >= threshold]
            if len(kept) >= module.LEAST_KEPT and good[kept].mean() >= precision - 1e-9:
                reached.append(threshold)
        return min(reached)

    pieces = np.vstack([*resampled(count, module.THRESHOLD_RESAMPLES, 4)]).astype(int)
    plain = [smallest(np.repeat(np.arange(count), m)) for m in pieces]
    # In the second case some resamples do not reach the precision.
    assert plain.count(1.0) > 10 or precision != 0.99
    low, high = np.percentile(plain, [2.5, 97.5])
    assert found.intervals["tau_keep"] == pytest.approx((low, high), abs=1e-9)

    def drop(rows: np.ndarray, tau_keep: float) -> float:
        """Leave a tenth of the drawn documents more than are kept."""
        kept = np.sum(quality[rows] >= tau_keep) if tau_keep < 1.0 else 0
        return np.sort(quality[rows])[::-1][math.ceil(kept + 0.1 * len(rows) - 1e-6) - 1]

    dropped = [
        drop(np.repeat(np.arange(count), m), tau_keep)
        for m, tau_keep in zip(pieces, plain, strict=True)
    ]
    low, high = np.percentile(dropped, [2.5, 97.5])
    assert found.intervals["tau_drop"] == pytest.approx((low, high), abs=1e-9)
    assert found.tau_keep == smallest(np.arange(count))


def test_calibration_survives_json() -> None:
    given = held_out(200)
    names = replace(given, domains=["a"] * 150 + ["b"] * 50)
    found = calibrate(names, Target(keep=0.4, by_domain=True))
    written = orjson.dumps(found.to_json())
    again = Calibration.from_json(orjson.loads(written))
    # As text, where NaN equals itself.
    assert repr(again) == repr(found) and orjson.dumps(again.to_json()) == written
    assert again.thresholds("a") != again.thresholds("b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tau_drop": 0.6, "tau_keep": 0.5},
        {"tau_drop": -0.1},
        {"tau_keep": 1.1},
        {"weights": (0.5, 0.4)},
        {"weights": (1.5, -0.5)},
        {"weights": ()},
        {"domains": {"a": (0.7, 0.2)}},
        {"tau_keep": float("nan")},
    ],
)
def test_what_is_no_calibration_is_refused(wrong: dict) -> None:
    right = {"weights": (0.5, 0.5), "tau_drop": 0.2, "tau_keep": 0.5}
    Calibration(**right)
    with pytest.raises(DataError, match="E-HYDRA-CALIBRATION"):
        Calibration(**{**right, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"keep": 0.5, "precision": 0.5},
        {"keep": 0.0},
        {"keep": 1.0},
        {"precision": 0.0},
        {"precision": 1.1},
        {"keep": 0.5, "band": 1.0},
        {"keep": 0.5, "band": -0.1},
        {"keep": 0.5, "good": 1.5},
        {"keep": 0.5, "weights": (0.0, 0.0)},
        {"keep": 0.5, "weights": (1.0, -1.0, 2.0)},
        {"keep": float("nan")},
    ],
)
def test_a_target_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT"):
        Target(**wrong)


def test_quality_is_the_weighted_share_of_the_highest_score() -> None:
    found = Calibration((0.75, 0.25), 0.1, 0.2)
    scores = np.array([[5, 5], [0, 0], [4, 0], [0, 4]], np.float32)
    np.testing.assert_allclose(found.quality(scores), [1.0, 0.0, 0.6, 0.2])
