"""Agreement: against scipy and scikit-learn, a plain bootstrap, and where it has no meaning."""

import math
import warnings

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nmoe_data.errors import DataError
from nmoe_data.hydra.agreement import Estimate, agreement, between_judges, resampled
from nmoe_data.hydra.labels import LABELS_SCHEMA
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import cohen_kappa_score, f1_score, mean_absolute_error

scores = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 0.25, 0.5])),
    min_size=3,
    max_size=60,
)


@given(scores)
@settings(max_examples=150, deadline=None)
def test_values_are_those_of_scipy_and_scikit_learn(rows: list[tuple[int, int, float]]) -> None:
    x = np.array([row[0] - row[2] for row in rows])
    y = np.array([row[1] for row in rows], float)
    found = agreement(x, y, thresholds=(2.0, 3.0), resamples=5)
    if np.ptp(x) and np.ptp(y):
        assert found["spearman"].value == pytest.approx(spearmanr(x, y).statistic, abs=1e-9)
        assert found["pearson"].value == pytest.approx(pearsonr(x, y).statistic, abs=1e-9)
    assert found["mae"].value == pytest.approx(mean_absolute_error(x, y), abs=1e-12)
    for threshold in (2.0, 3.0):
        f1 = found[f"f1_at_{threshold:g}"]
        if (x >= threshold).any() or (y >= threshold).any():
            assert f1.value == pytest.approx(f1_score(y >= threshold, x >= threshold), abs=1e-12)
        else:
            assert math.isnan(f1.value) and "reaches" in f1.reason


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=60))
@settings(max_examples=100, deadline=None)
def test_kappa_of_whole_scores_is_the_quadratically_weighted_one(rows: list) -> None:
    x, y = (np.array(column) for column in zip(*rows, strict=True))
    found = agreement(x, y, resamples=2)["kappa"].value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = cohen_kappa_score(x, y, labels=range(6), weights="quadratic")
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_intervals_are_percentiles_of_statistics_of_resampled_documents() -> None:
    draw = np.random.default_rng(3)
    y = draw.integers(0, 6, 40).astype(float)
    x = np.clip(y + draw.normal(0, 1.5, 40).round(1), 0, 5)
    found = agreement(x, y, resamples=300, seed=7)
    rows = [np.repeat(np.arange(40), m.astype(int)) for m in np.vstack([*resampled(40, 300, 7)])]
    assert all(len(row) == 40 for row in rows)
    plain = {
        "spearman": [spearmanr(x[row], y[row]).statistic for row in rows],
        "pearson": [pearsonr(x[row], y[row]).statistic for row in rows],
        "mae": [np.abs(x[row] - y[row]).mean() for row in rows],
        "f1_at_3": [f1_score(y[row] >= 3, x[row] >= 3) for row in rows],
    }
    for name, values in plain.items():
        low, high = np.percentile(values, [2.5, 97.5])
        assert (found[name].low, found[name].high) == pytest.approx((low, high), abs=1e-9)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rho, hits = 0.6, 0
    for trial in range(200):
        draw = np.random.default_rng((5, trial))
        x, noise = draw.normal(size=(2, 120))
        y = rho * x + math.sqrt(1 - rho * rho) * noise
        found = agreement(x, y, resamples=200)["pearson"]
        hits += found.low <= rho <= found.high
    # 95 % of 200 is 190; a percentile interval of 120 documents is a little short. Five sigma.
    assert 165 <= hits <= 199


def test_the_same_seed_draws_the_same_resamples_whatever_their_number() -> None:
    few, many = (np.vstack([*resampled(30, count, 1)]) for count in (10, 100))
    assert (few == many[:10]).all()
    assert (many != np.vstack([*resampled(30, 100, 2)])).any()


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        ([2.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], "all predictions are equal"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [3.0] * 5, "all labels are equal"),
        ([1.0], [2.0], "one document"),
        ([], [], "no documents"),
    ],
)
def test_what_has_no_meaning_is_nan_with_a_reason_and_no_warning(
    x: list[float], y: list[float], reason: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = agreement(x, y)["spearman"]
    assert math.isnan(found.value) and math.isnan(found.low) and found.reason == reason
    assert not found.is_positive and reason in str(found)


def test_an_interval_that_touches_zero_is_not_positive() -> None:
    assert Estimate(0.3, 0.01, 0.5).is_positive
    assert not Estimate(0.3, 0.0, 0.5).is_positive
    assert not Estimate(0.3, -0.1, 0.5).is_positive


@pytest.mark.parametrize(
    ("x", "y"), [([1.0], [1.0, 2.0]), ([float("nan")] * 3, [1.0] * 3), ([[1.0]], [[1.0]])]
)
def test_lists_that_cannot_be_compared_are_refused(x: list, y: list) -> None:
    with pytest.raises(DataError, match="E-ARGUMENT"):
        agreement(x, y)


def test_judges_are_compared_on_what_both_of_them_scored() -> None:
    def row(document: int, model: str, scores: list[int] | None) -> dict:
        status = "refused" if scores is None else "scored"
        blank = dict.fromkeys(LABELS_SCHEMA.names)
        known = {"document_id": f"d{document}", "model": model, "scores": scores}
        return {**blank, **known, "status": status}

    strict = {at: [at % 6, 0] for at in range(30)}
    mild = {at: [min(5, at % 6 + 1), at % 2] for at in range(5, 30)}
    rows = [row(at, "strict", value) for at, value in strict.items()]
    rows += [row(at, "mild", value) for at, value in mild.items()]
    rows += [row(at, "mild", None) for at in range(5)]
    table = pa.Table.from_pylist(rows, LABELS_SCHEMA)
    first, second = between_judges(table, ["a", "b"])
    assert first["judges"] == second["judges"] == ["mild", "strict"]
    assert (first["dimension"], second["dimension"]) == ("a", "b")
    assert first["documents"] == second["documents"] == 25
    pairs = [(mild[at][0], strict[at][0]) for at in mild]
    assert first["exact"] == np.mean([one == other for one, other in pairs])
    expected = spearmanr(*zip(*pairs, strict=True)).statistic
    assert first["spearman"]["value"] == pytest.approx(expected)
    assert second["spearman"]["reason"] == "all labels are equal"
