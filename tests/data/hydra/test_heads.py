"""Heads: what they compute, how they are trained, and the folder that holds them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nmoe_data.errors import DataError
from nmoe_data.hydra import ridge
from nmoe_data.hydra.encoder import open_encoder
from nmoe_data.hydra.encoder.hashed import HashedEncoder
from nmoe_data.hydra.heads import Heads, PooledJudge, Probe, open_heads, save_heads
from nmoe_data.hydra.networks import Task, TokenJudge, TokenNetwork, train_pooled, train_tokens
from nmoe_data.hydra.ridge import ridge_path
from nmoe_data.hydra.rubric import load_rubric
from nmoe_data.hydra.train import fit_probe
from scipy.sparse import csr_array, random_array
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge

WIDTH = HashedEncoder.width
TEXTS = ["one text of words", "another, longer text of words\n", "return self.x"]


def silent(*_: object) -> None:
    pass


@pytest.fixture
def heads() -> Heads:
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    layers = ((normal(6, 4), normal(4)), (normal(4, 5), normal(5)))
    judge = PooledJudge(normal(WIDTH, 6), normal(6), np.abs(normal(6)) + 1, layers)
    encoder = open_encoder("hashed")
    probe = Probe(normal(WIDTH, 5), normal(5) + 2)
    return Heads(
        load_rubric("prose"), "hashed", encoder.hash, WIDTH, probe, judge, info={"seed": 3}
    )


def test_heads_that_were_saved_compute_the_same(heads: Heads, tmp_path: Path) -> None:
    saved = save_heads(tmp_path / "heads", heads)
    opened = open_heads(tmp_path / "heads")
    assert opened.hash == saved.hash != "" and opened.info == {"seed": 3}
    assert opened.rubric == load_rubric("prose") and opened.calibration is None
    features = HashedEncoder().encode(TEXTS)
    assert (opened.probe_scores(features) == heads.probe_scores(features)).all()
    assert (opened.judge_scores(features) == heads.judge_scores(features)).all()
    assert (tmp_path / "heads" / "rubric.toml").read_bytes() == heads.rubric.toml


def test_scores_are_products_cut_to_the_range(heads: Heads) -> None:
    features = HashedEncoder().encode(TEXTS)
    dense = features.toarray().astype(np.float64)
    raw = dense @ heads.probe.weight + heads.probe.bias
    found = heads.probe_scores(features)
    np.testing.assert_allclose(found, raw.clip(0, 5), atol=1e-4)
    assert found.dtype == np.float32 and raw.min() < 0 and raw.max() > 5
    judge = heads.judge
    assert isinstance(judge, PooledJudge)
    x = torch.from_numpy((dense @ judge.projection - judge.mean) / judge.scale)
    (first, first_bias), (last, last_bias) = judge.layers
    hidden = torch.relu(x @ torch.from_numpy(first).double() + torch.from_numpy(first_bias))
    expected = (
        raw + (hidden @ torch.from_numpy(last).double() + torch.from_numpy(last_bias)).numpy()
    )
    np.testing.assert_allclose(heads.judge_scores(features), expected.clip(0, 5), atol=1e-3)


def test_heads_refuse_another_encoder_and_other_widths(heads: Heads) -> None:
    heads.check_encoder(HashedEncoder())
    other = HashedEncoder()
    other.hash = "0" * 64
    with pytest.raises(DataError, match=r"E-HYDRA-ENCODER.*0000000000000000"):
        heads.check_encoder(other)
    for scores in (heads.probe_scores, heads.judge_scores):
        with pytest.raises(DataError, match="E-HYDRA-ENCODER"):
            scores(np.zeros((1, WIDTH - 1), np.float32))


def test_heads_without_a_judge_say_so(heads: Heads, tmp_path: Path) -> None:
    save_heads(tmp_path, heads)
    save_heads(tmp_path, replace(heads, judge=None))
    alone = open_heads(tmp_path)
    assert not alone.has_judge and not (tmp_path / "judge.safetensors").exists()
    with pytest.raises(DataError, match="E-HYDRA-NO-JUDGE"):
        alone.judge_scores(HashedEncoder().encode(TEXTS))


@pytest.mark.parametrize("name", ["probe.safetensors", "judge.safetensors", "rubric.toml"])
def test_files_of_two_trainings_are_not_mixed(heads: Heads, tmp_path: Path, name: str) -> None:
    save_heads(tmp_path / "a", heads)
    judge = heads.judge
    assert isinstance(judge, PooledJudge)
    other = replace(
        heads,
        rubric=load_rubric("code"),
        probe=Probe(heads.probe.weight + 1, heads.probe.bias),
        judge=replace(judge, mean=judge.mean + 1),
    )
    save_heads(tmp_path / "b", other)
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(DataError, match=f"E-HYDRA-HEADS.*{name}"):
        open_heads(tmp_path / "a")


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "not json", '{"schema_version": 99}'])
def test_a_folder_that_holds_no_heads_is_one_line(
    heads: Heads, tmp_path: Path, damage: str
) -> None:
    with pytest.raises(DataError, match=r"E-HYDRA-HEADS.*has no head.json"):
        open_heads(tmp_path / "nothing")
    save_heads(tmp_path, heads)
    (tmp_path / "head.json").write_text(damage)
    with pytest.raises(DataError, match="E-HYDRA-HEADS"):
        open_heads(tmp_path)


def test_heads_are_used_without_torch(heads: Heads, tmp_path: Path) -> None:
    save_heads(tmp_path, heads)
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from nmoe_data.hydra.heads import open_heads\n"
        "from nmoe_data.hydra.encoder import open_encoder\n"
        "heads, encoder = open_heads(sys.argv[1]), open_encoder('hashed')\n"
        "features = encoder.encode(['a text'])\n"
        "judged = heads.judge_texts(encoder, ['a text'], features)\n"
        "print(heads.probe_scores(features).shape, judged.shape)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert result.stdout.strip() == "(1, 5) (1, 5)", result.stderr


@pytest.mark.parametrize(
    ("documents", "width", "sparse", "largest"),
    [(80, 12, False, 4096), (30, 70, False, 4096), (60, 90, True, 4096), (60, 90, True, 10)],
    ids=["few features", "few documents", "sparse", "sparse and many"],
)
def test_ridge_path_is_that_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, documents: int, width: int, sparse: bool, largest: int
) -> None:
    monkeypatch.setattr(ridge, "LARGEST_MATRIX", largest)
    monkeypatch.setattr(ridge, "TOLERANCE", 1e-10)
    draw = np.random.default_rng(0)
    dense = (
        random_array((documents, width), density=0.3, rng=draw).toarray()
        if sparse
        else draw.normal(size=(documents, width)) + 3
    )
    targets = draw.normal(size=(documents, 3)) + 2
    features = csr_array(dense) if sparse else dense
    for alpha, weight, bias in ridge_path(features, targets, (0.01, 1.0, 100.0)):
        expected = Ridge(alpha=alpha, solver="svd").fit(dense, targets)
        np.testing.assert_allclose(weight.T, expected.coef_, atol=2e-4)
        np.testing.assert_allclose(bias, expected.intercept_, atol=2e-4)


def test_probe_takes_each_dimensions_best_regularisation_on_the_validation_part() -> None:
    draw = np.random.default_rng(1)
    features = (draw.normal(size=(300, 40)) * draw.uniform(0.1, 100, 40) + 7).astype(np.float32)
    truth = draw.normal(size=40) / features.std(axis=0)
    clean = features @ truth
    scores = np.stack([clean, draw.normal(size=300) * 3], axis=1).astype(np.float32)
    rows = {"train": list(range(100)), "validation": list(range(100, 200))}
    probe, alphas = fit_probe(features, scores, rows, silent)
    assert alphas[0] < alphas[1]
    for column, alpha in enumerate(alphas):
        train = features[:100].astype(np.float64)
        mean, scale = train.mean(axis=0), train.std(axis=0)
        errors = {}
        for candidate in (alpha, alpha * 10**0.5, alpha / 10**0.5):
            fitted = Ridge(alpha=candidate).fit((train - mean) / scale, scores[:100, column])
            predicted = fitted.predict((features[:200] - mean) / scale)
            errors[candidate] = np.square(predicted[100:] - scores[100:200, column]).mean()
            if candidate == alpha:
                got = probe.raw_scores(features[:200])[:, column]
                np.testing.assert_allclose(got, predicted, atol=5e-3)
        assert errors[alpha] == min(errors.values()) or alpha in (1e-2, 1e5)


def curved(count: int = 900) -> tuple[np.ndarray, np.ndarray, Task]:
    """Inputs whose scores no line follows; the probe's base is the best line."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(count, 6)).astype(np.float32)
    curve = np.stack([np.abs(x[:, 0]) * 2, x[:, 1] * x[:, 2] + 2.5], axis=1)
    labels = (curve + draw.normal(0, 0.1, curve.shape)).clip(0, 5).astype(np.float32)
    train, validation = list(range(600)), list(range(600, 750))
    base = Ridge().fit(x[train], labels[train]).predict(x).astype(np.float32)
    return x, labels, Task(base, labels, train, validation, 0, silent)


def forward(layers: tuple, x: np.ndarray) -> np.ndarray:
    identity = PooledJudge(None, np.zeros(x.shape[1]), np.ones(x.shape[1]), layers)
    return identity.corrections(x)


def test_judge_learns_what_the_probe_gets_wrong() -> None:
    x, labels, task = curved()
    layers, outcome = train_pooled(x, task)
    got = (task.base + forward(layers, x))[750:]
    for column in range(2):
        before = spearmanr(task.base[750:, column], labels[750:, column]).statistic
        after = spearmanr(got[:, column], labels[750:, column]).statistic
        assert before < 0.3 and after > 0.8
    part = task.base[600:750] + forward(layers, x)[600:750]
    error = np.square(part.clip(0, 5) - labels[600:750]).mean()
    assert outcome.error == pytest.approx(error, rel=1e-4)
    assert 0 < outcome.best_pass <= outcome.passes and outcome.error < outcome.probe_error


def test_judge_stays_the_probe_where_there_is_nothing_to_learn() -> None:
    x, labels, task = curved(900)
    draw = np.random.default_rng(2)
    noise = (task.base + draw.normal(size=labels.shape)).astype(np.float32)
    layers, outcome = train_pooled(x, replace(task, labels=noise, base=noise * 0 + 2.5))
    kept = outcome.error <= outcome.probe_error
    assert kept
    if outcome.best_pass == 0:
        assert (forward(layers, x) == 0).all()


def test_training_is_the_same_bit_for_bit_with_one_seed_and_any_threads() -> None:
    x, _, task = curved(900)
    first, _ = train_pooled(x, task)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(99)
    try:
        again, _ = train_pooled(x, task)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    other, _ = train_pooled(x, replace(task, seed=1))
    for one, two, three in zip(first, again, other, strict=True):
        assert (one[0] == two[0]).all() and (one[1] == two[1]).all()
        assert (one[0] != three[0]).any()


def test_interrupting_a_training_stops_it() -> None:
    def stop(done: int, total: int, error: float) -> None:
        raise KeyboardInterrupt

    x, _, task = curved(900)
    with pytest.raises(KeyboardInterrupt):
        train_pooled(x, replace(task, report=stop))


def token_documents(count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 24, count)
    return [draw.normal(size=(length, 8)).astype(np.float32) for length in lengths]


def test_token_judge_does_not_see_padding_or_neighbours() -> None:
    torch.manual_seed(0)
    sizes = {"width": 8, "outputs": 3, "hidden": 16, "layers": 2, "heads": 4}
    network = TokenNetwork(**sizes).eval()
    torch.nn.init.normal_(network.output.weight)
    judge = TokenJudge(network, sizes, 100)
    states = token_documents(150)
    whole = judge.corrections(states)
    alone = np.concatenate([judge.corrections([part]) for part in states])
    np.testing.assert_allclose(whole, alone, atol=1e-5)
    assert np.ptp(whole, axis=0).min() > 0.1
    # A document's own tokens do count.
    changed = [states[0].copy(), *states[1:]]
    changed[0][-1, 0] += 5
    assert np.abs(judge.corrections(changed)[0] - whole[0]).max() > 1e-3


def test_token_judge_learns_what_a_mean_cannot_tell_and_survives_its_folder(
    heads: Heads, tmp_path: Path
) -> None:
    # The largest value among a document's tokens: no function of their mean.
    states = token_documents(400)
    peak = np.array([part[:, 0].max() for part in states])
    labels = np.stack([peak.clip(0, 5)] * 5, axis=1).astype(np.float32)
    base = np.full_like(labels, labels.mean())
    task = Task(base, labels, list(range(240)), list(range(240, 300)), 0, silent)
    judge, outcome = train_tokens(states, 64, task)
    got = judge.corrections(states[300:])
    means = np.stack([part.mean(axis=0) for part in states])
    pooled = Ridge().fit(means[:240], labels[:240, 0]).predict(means[300:])
    assert spearmanr(pooled, labels[300:, 0]).statistic < 0.5
    assert spearmanr(got[:, 0], labels[300:, 0]).statistic > 0.6
    assert outcome.error < 0.5 * outcome.probe_error
    save_heads(tmp_path, replace(heads, judge=judge))
    opened = open_heads(tmp_path).judge
    assert isinstance(opened, TokenJudge) and opened.max_tokens == 64
    assert (opened.corrections(states[300:]) == got).all()
