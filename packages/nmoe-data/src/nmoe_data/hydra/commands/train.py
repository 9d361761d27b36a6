"""`nmoe-data hydra train` and `calibrate`: heads from labels, and thresholds for them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmoe_data.console import Shown, shown_progress
from nmoe_data.errors import DataError
from nmoe_data.hydra.extras import extra

if TYPE_CHECKING:
    from nmoe_data.hydra.calibrate import Calibration
    from nmoe_data.hydra.heads import Heads
    from nmoe_data.hydra.train import TrainProgress

HEAD_KINDS = ("probe", "judge")
JUDGE_KINDS = ("mlp", "transformer")
HASHED = "hashed"

LabelsFolder = Annotated[Path, typer.Argument(metavar="LABELS", help="What label wrote.")]
Device = Annotated[str, typer.Option(help="Where a neural encoder computes: cpu, cuda, cuda:1.")]
Dtype = Annotated[str, typer.Option(help="In what: float32, bfloat16, float16.")]
Embeddings = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps features.  [default: LABELS/embeddings if neural]"),
]


def train_command(
    labels: LabelsFolder,
    out: Annotated[Path, typer.Option("--out", help="Folder for the heads.")],
    encoder: Annotated[
        str, typer.Option(help="hashed, onnx:FOLDER, hf:MODEL or causal:MODEL:LAYER.")
    ] = HASHED,
    heads: Annotated[str, typer.Option(help="probe, or probe,judge.")] = "probe,judge",
    judge: Annotated[
        str, typer.Option(help="Kind of the judge head: mlp, or transformer over token states.")
    ] = "mlp",
    model: Annotated[
        str | None, typer.Option(help="Learn this judge's scores alone; else the mean of all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the judge head's training.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="That a transformer reads.")] = 256,
    embeddings: Embeddings = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Train heads on the labels, and say how well they agree on held-out ones."""
    with extra("hydra"):
        from nmoe_data.hydra.encoder import open_encoder
        from nmoe_data.hydra.labels import read_labels
        from nmoe_data.hydra.train import TrainSettings, train_heads

    settings = TrainSettings(
        judge=_judge_kind(heads, judge),
        model=model,
        seed=seed,
        embeddings=_embeddings(labels, encoder, embeddings),
        max_tokens=max_tokens,
        device=device,
    )
    found = read_labels(labels)
    opened = open_encoder(encoder, device=device, dtype=dtype)
    try:
        with shown_progress(_shown) as progress:
            trained = train_heads(found, opened, out, settings, progress)
    except KeyboardInterrupt:
        typer.echo(f"stopped; no heads were written to {out}", err=True)
        raise
    _print_heads(out, trained)


def _judge_kind(heads: str, judge: str) -> str | None:
    kinds = heads.split(",")
    if "probe" not in kinds or set(kinds) - set(HEAD_KINDS) or judge not in JUDGE_KINDS:
        raise DataError(
            "E-ARGUMENT",
            f"--heads {heads} --judge {judge}",
            "give --heads probe or --heads probe,judge, and --judge mlp or transformer",
        )
    return judge if "judge" in kinds else None


def _embeddings(labels: Path, encoder: str, given: Path | None) -> Path | None:
    # Hashed features are computed faster than they are read.
    return labels / "embeddings" if given is None and encoder != HASHED else given


def _shown(now: "TrainProgress") -> Shown:
    return Shown(now.stage, now.done, now.total, now.detail)


def _print_heads(out: Path, heads: "Heads") -> None:
    info = heads.info
    counts = ", ".join(f"{split} {count:,}" for split, count in info["documents"].items())
    typer.echo(f"trained: {out}")
    typer.echo(f"  encoder   {heads.encoder_spec}, {heads.encoder_width:,} features")
    typer.echo(f"  documents {counts}")
    if info["training"] is not None:
        training = info["training"]
        typer.echo(
            f"  judge     {training['passes']} passes, the best was {training['best_pass']}: "
            f"validation error {training['probe_error']:.3f} -> {training['error']:.3f}"
        )
    for split, by_head in info["metrics"].items():
        for name, dimensions in by_head.items():
            typer.echo(f"  {split}, {name}: rank correlation, mean absolute error [95 %]")
            for dimension, found in dimensions.items():
                spearman, error = _interval(found["spearman"]), _interval(found["mae"])
                typer.echo(f"    {dimension:<16} {spearman:<28} {error}")
    test = info["metrics"]["test"]
    best = test["judge" if heads.has_judge else "probe"]
    if not any((found["spearman"]["low"] or 0.0) > 0 for found in best.values()):
        typer.echo("no agreement: no dimension's interval lies above zero", err=True)


def _interval(found: dict[str, Any]) -> str:
    if found["reason"]:
        return f"none: {found['reason']}"
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def calibrate_command(
    heads: Annotated[Path, typer.Argument(metavar="HEADS", help="What train wrote.")],
    labels: LabelsFolder,
    target_keep: Annotated[
        float | None, typer.Option(help="Share of the corpus to keep.  [default: 0.5]")
    ] = None,
    target_precision: Annotated[
        float | None, typer.Option(help="Share of the kept documents that shall be good.")
    ] = None,
    good: Annotated[float, typer.Option(help="Label quality, 0 to 1, of a good document.")] = 0.6,
    band: Annotated[float, typer.Option(help="Share of the corpus left to the judge.")] = 0.1,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME=W,...", help="Weights of the dimensions; else they are fitted."),
    ] = None,
    by_domain: Annotated[
        bool, typer.Option("--by-domain", help="Thresholds for each source of its own.")
    ] = False,
    least_domain: Annotated[
        int, typer.Option(min=20, help="Held-out documents that a source needs for its own.")
    ] = 100,
    force: Annotated[
        bool, typer.Option("--force", help="Go on although the heads do not agree.")
    ] = False,
    embeddings: Embeddings = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Choose the thresholds on held-out labels; exit 2 if the heads do not agree with them."""
    with extra("hydra"):
        from nmoe_data.hydra.calibrate import Target
        from nmoe_data.hydra.calibrated import calibrate_heads
        from nmoe_data.hydra.encoder import open_encoder
        from nmoe_data.hydra.heads import open_heads
        from nmoe_data.hydra.labels import read_labels
        from nmoe_data.hydra.train import TrainProgress

    opened = open_heads(heads)
    target = Target(
        keep=0.5 if target_keep is None and target_precision is None else target_keep,
        precision=target_precision,
        good=good,
        band=band,
        weights=_weights(weights, opened.rubric.names) if weights else None,
        by_domain=by_domain,
        least_domain=least_domain,
    )
    encoder = open_encoder(opened.encoder_spec, device=device, dtype=dtype)
    with shown_progress(_shown) as progress:
        calibration = calibrate_heads(
            heads,
            opened,
            read_labels(labels),
            encoder,
            target,
            force=force,
            embeddings=_embeddings(labels, opened.encoder_spec, embeddings),
            progress=lambda done, total: progress(TrainProgress("encode", done, total)),
        )
    _print_calibration(heads, calibration, opened.rubric.names)


def _weights(text: str, names: tuple[str, ...]) -> tuple[float, ...]:
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            given[name.strip()] = float(number)
        except ValueError:
            raise _weights_problem(part, names) from None
    if given.keys() - set(names):
        raise _weights_problem(", ".join(sorted(given.keys() - set(names))), names)
    return tuple(given.get(name, 0.0) for name in names)


def _weights_problem(part: str, names: tuple[str, ...]) -> DataError:
    remedy = f"give NAME=NUMBER for any of {', '.join(names)}"
    return DataError("E-ARGUMENT", f"--weights names {part}", remedy)


def _print_calibration(folder: Path, found: "Calibration", names: tuple[str, ...]) -> None:
    weights = zip(names, found.weights, strict=True)
    value, low, high = found.agreement
    typer.echo(f"calibrated: {folder} on {found.documents:,} held-out documents")
    typer.echo(f"  agreement {value:.3f} [{low:.3f}, {high:.3f}] (rank correlation of quality)")
    typer.echo("  weights   " + ", ".join(f"{name} {weight:.2f}" for name, weight in weights))
    at = {point.threshold: point for point in found.curve}
    for name, threshold in (("tau_drop", found.tau_drop), ("tau_keep", found.tau_keep)):
        point = at[threshold]
        between = "[{:.3f}, {:.3f}]".format(*found.intervals[name])
        rates = (("keeps", point.share), ("precision", point.precision), ("recall", point.recall))
        shown = ", ".join(f"{rate} {_percent(triple)}" for rate, triple in rates)
        typer.echo(f"  {name}  {threshold:.3f} {between}: {shown}")
    for name, (drop, keep) in found.domains.items():
        typer.echo(f"  {name}: tau_drop {drop:.3f}, tau_keep {keep:.3f}")
    for note in found.notes:
        typer.echo(f"  {note}")
    if found.forced:
        typer.echo("forced: the heads do not agree with the held-out labels", err=True)


def _percent(triple: tuple[float, float, float]) -> str:
    value, low, high = triple
    return "none" if value != value else f"{value:.0%} [{low:.0%}, {high:.0%}]"
