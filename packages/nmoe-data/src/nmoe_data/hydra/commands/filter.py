"""`nmoe-data hydra filter`: heads, and for the band a judge, decide what of a corpus stays."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmoe_data.console import Shown, shown_progress
from nmoe_data.errors import DataError

if TYPE_CHECKING:
    from nmoe_data.hydra.filter import Asking, FilterProgress, FilterResult


def filter_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Folders, files, or python-stdlib.")
    ],
    heads: Annotated[Path, typer.Option("--heads", help="Calibrated heads.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to make; a stopped run goes on.")],
    workers: Annotated[
        int | None, typer.Option(help="Processes, or Ray actors.  [default: 1]")
    ] = None,
    devices: Annotated[
        str, typer.Option(metavar="D,D...", help="A process for each, as in cuda:0,cuda:1.")
    ] = "",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Work on this Ray cluster: auto, local, HOST:PORT."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="In which a neural encoder computes.")] = "float32",
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    band: Annotated[
        str, typer.Option(help="keep or drop: what the heads cannot tell and no judge scored.")
    ] = "keep",
    band_model: Annotated[
        str | None, typer.Option(help="A judge for the band; none without it.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Its server.  [default: https://api.openai.com/v1]")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with its key.")
    ] = "OPENAI_API_KEY",
    no_key: Annotated[bool, typer.Option("--no-key", help="The server wants no key.")] = False,
    max_requests: Annotated[
        int | None, typer.Option(help="Most documents that are put to the judge.")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="Stop asking before it costs more.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop asking before it takes more.")
    ] = None,
    price_in: Annotated[float, typer.Option(min=0.0, help="Per million tokens of prompts.")] = 0.0,
    price_out: Annotated[float, typer.Option(min=0.0, help="Per million tokens of replies.")] = 0.0,
    no_schema: Annotated[
        bool, typer.Option("--no-schema", help="Do not hold the server to a JSON schema.")
    ] = False,
    no_temperature: Annotated[
        bool, typer.Option("--no-temperature", help="For models that refuse the field.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one request.")] = 120.0,
    dropped_sample: Annotated[
        int | None, typer.Option(help="Lines of dropped.jsonl.  [default: 1000]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses them.")] = 0,
) -> None:
    """Keep what the heads grade well; run the same command again to resume.

    --band keep is the default as it loses nothing: kept documents carry their quality, so a
    stricter cut later needs no new run.
    """
    from nmoe_data.hydra.filter import FilterSettings, filter_corpus
    from nmoe_data.hydra.filter.settings import DROPPED_SAMPLE

    if devices and workers is not None:
        raise DataError("E-ARGUMENT", "--workers and --devices together", "give one of them")
    asking = None
    if band_model is not None:
        asking = _asking(
            band_model,
            base_url,
            {"max_cost": max_cost, "max_tokens": max_tokens, "max_requests": max_requests},
            {
                "key_variable": None if no_key else api_key_env,
                "schema": not no_schema,
                "temperature": None if no_temperature else 0.0,
                "timeout_s": timeout,
                "price_in": price_in,
                "price_out": price_out,
            },
        )
    elif any(given is not None for given in (base_url, max_cost, max_tokens, max_requests)):
        raise DataError("E-ARGUMENT", "a server or a budget but no judge", "give --band-model")
    settings = FilterSettings(
        workers=1 if workers is None else workers,
        devices=tuple(filter(None, devices.split(","))),
        ray=ray,
        text_field=text_field,
        band=band,
        asking=asking,
        dropped_sample=DROPPED_SAMPLE if dropped_sample is None else dropped_sample,
        seed=seed,
        dtype=dtype,
    )
    try:
        with shown_progress(_shown) as progress:
            result = filter_corpus(sources, heads, out, settings, progress=progress)
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to go on", err=True)
        raise
    _print_result(result)


def _asking(
    model: str, base_url: str | None, limits: dict[str, Any], judge: dict[str, Any]
) -> "Asking":
    from nmoe_data.hydra.client.settings import JudgeSettings
    from nmoe_data.hydra.filter import Asking

    place: dict[str, Any] = {"base_url": base_url} if base_url else {}
    return Asking(JudgeSettings(name=model, model=model, **place, **judge), **limits)


def _shown(now: "FilterProgress") -> Shown:
    share = now.kept / max(now.documents, 1)
    parts = [f"{now.documents:,} documents", f"{now.documents_per_s:,.0f}/s", f"kept {share:.0%}"]
    if now.rejected:
        parts.append(f"{now.rejected:,} rejected")
    if now.asked:
        parts.append(f"{now.asked:,} asked")
    return Shown("filter", now.bytes_done, now.bytes_total, ", ".join(parts), in_bytes=True)


def _print_result(result: "FilterResult") -> None:
    summary = result.summary
    counts, rates = summary["counts"], summary["rates"]
    typer.echo(f"{'already filtered' if result.reused else 'filtered'}: {result.out}")
    typer.echo(f"  documents {counts['documents']:,}")
    typer.echo(f"  kept      {counts['kept']:,} ({rates['kept']:.1%})")
    for name, count in counts["decided"].items():
        typer.echo(f"  {name:<13} {count:,}")
    rejected = sum(counts["rejected"].values())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts["rejected"].items())
    typer.echo(f"  rejected  {rejected:,}" + (f" ({reasons})" if reasons else ""))
    llm = summary["llm"]
    if llm:
        tokens = llm["prompt_tokens"] + llm["completion_tokens"]
        over = ", then the budget was spent" if llm["stopped"] else ""
        typer.echo(
            f"  judge     {llm['requests']:,} documents, {tokens:,} tokens, "
            f"cost {llm['cost']:,.4f}{over}"
        )
