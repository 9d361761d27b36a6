"""`nmoe-data hydra label`: judges grade a sample of the sources."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nmoe_data.console import Shown, shown_progress
from nmoe_data.errors import DataError

if TYPE_CHECKING:
    from nmoe_data.hydra.batches import BatchProgress
    from nmoe_data.hydra.documents import SampleProgress
    from nmoe_data.hydra.labelling import LabelResult
    from nmoe_data.hydra.session import GradingProgress


def label_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Folders, files, or python-stdlib.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make; a stopped run goes on.")],
    model: Annotated[str | None, typer.Option(help="The judge's model.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Its server.  [default: https://api.openai.com/v1]")
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL[@BASE_URL]", help="One of several judges; repeat it."),
    ] = None,
    rubric: Annotated[str, typer.Option(help="prose, code, or the path of a TOML file.")] = "prose",
    sample: Annotated[int, typer.Option(help="Documents to grade.")] = 2000,
    seed: Annotated[int, typer.Option(help="Chooses the documents.")] = 0,
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    max_characters: Annotated[int, typer.Option(help="Of a document that is shown.")] = 24_000,
    api_key_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[JUDGE=]VARIABLE",
            help="Environment variable with the key.  [default: OPENAI_API_KEY]",
        ),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="The server wants no key.")] = False,
    max_cost: Annotated[float | None, typer.Option(help="Stop before it costs more.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop before it takes more.")] = None,
    price_in: Annotated[float, typer.Option(min=0.0, help="Per million tokens of prompts.")] = 0.0,
    price_out: Annotated[float, typer.Option(min=0.0, help="Per million tokens of replies.")] = 0.0,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="JUDGE=IN/OUT", help="Prices of one judge; repeat it."),
    ] = None,
    no_schema: Annotated[
        bool, typer.Option("--no-schema", help="Do not hold the server to a JSON schema.")
    ] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Also take mean scores from log-probabilities.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of the judge.")] = 0.0,
    no_temperature: Annotated[
        bool, typer.Option("--no-temperature", help="For models that refuse the field.")
    ] = False,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Room for a reply.")] = 512,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds for one request.")] = 120.0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Most requests at once, per judge.")
    ] = 256,
    batch: Annotated[
        bool, typer.Option("--batch", help="By the batch interface first, the rest live.")
    ] = False,
    injection: Annotated[
        int, typer.Option(help="Documents to grade with an attack in them too.")
    ] = 0,
) -> None:
    """Have LLMs grade a sample by a rubric; run the same command again to resume."""
    from nmoe_data.hydra.client.settings import JudgeSettings
    from nmoe_data.hydra.labelling import LabelSettings, label
    from nmoe_data.hydra.rubric import load_rubric

    named = _judges(model, base_url, judge or [])
    variables = _by_judge("--api-key-env", api_key_env or [], list(named))
    prices = _by_judge("--price", price or [], list(named))
    asked = []
    for name, place in named.items():
        given: dict[str, Any] = {**place}
        if no_key or name in variables:
            given["key_variable"] = None if no_key else variables[name]
        own = _price(prices[name]) if name in prices else (price_in, price_out)
        asked.append(
            JudgeSettings(
                name=name,
                schema=not no_schema,
                logprobs=logprobs,
                temperature=None if no_temperature else temperature,
                reply_tokens=reply_tokens,
                timeout_s=timeout,
                concurrency=concurrency,
                price_in=own[0],
                price_out=own[1],
                **given,
            )
        )
    settings = LabelSettings(
        sample=sample,
        seed=seed,
        text_field=text_field,
        max_characters=max_characters,
        max_cost=max_cost,
        max_tokens=max_tokens,
        batch=batch,
        injection=injection,
    )
    with shown_progress(_shown) as progress:
        result = label(sources, out, asked, load_rubric(rubric), settings, progress)
    _print_result(result)


def _judges(
    model: str | None, base_url: str | None, judges: list[str]
) -> dict[str, dict[str, str]]:
    """Returns model and base URL of each judge by its name; without a URL, the default holds."""
    if (model is None) == (not judges):
        raise DataError(
            "E-ARGUMENT", "no judge, or two ways of naming one", "give --model, or --judge for each"
        )
    url = {"base_url": base_url} if base_url else {}
    if model is not None:
        return {model: {"model": model, **url}}
    found = {}
    for option in judges:
        name, _, rest = option.partition("=")
        cut = max(rest.find("@http://"), rest.find("@https://"))
        place = {"model": rest[:cut], "base_url": rest[cut + 1 :]} if cut >= 0 else {"model": rest}
        if not name or not place["model"] or name in found:
            what = f"--judge {name}=... does not name a new judge and a model"
            raise DataError("E-ARGUMENT", what, "give NAME=MODEL or NAME=MODEL@BASE_URL")
        found[name] = {**url, **place}
    return found


def _by_judge(option: str, values: list[str], judges: list[str]) -> dict[str, str]:
    """Returns the value of each judge; one without a name is for those that have none."""
    for_all: dict[str, str] = {}
    for_one: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name not in judges:
            what = f"{option} {name}=... names no judge ({', '.join(judges)} are there)"
            raise DataError("E-ARGUMENT", what, "give the name of a judge before the =")
        if equals:
            for_one[name] = rest
        else:
            for_all = dict.fromkeys(judges, value)
    return {**for_all, **for_one}


def _price(text: str) -> tuple[float, float]:
    try:
        price_in, price_out = map(float, text.split("/"))
    except ValueError:
        what = f"--price {text} is not two numbers"
        raise DataError("E-ARGUMENT", what, "give JUDGE=IN/OUT, per million tokens") from None
    return price_in, price_out


def _shown(now: "SampleProgress | BatchProgress | GradingProgress") -> Shown:
    from nmoe_data.hydra.batches import BatchProgress
    from nmoe_data.hydra.documents import SampleProgress

    if isinstance(now, SampleProgress):
        detail = f"{now.documents:,} documents"
        return Shown("sample", now.bytes_done, now.bytes_total, detail, in_bytes=True)
    if isinstance(now, BatchProgress):
        return Shown("batches", now.done, now.total, now.state)
    parts = [f"{now.rate:,.0f}/s", f"{now.under_way} under way"]
    if now.waiting_s > 0.0:
        parts.append(f"the server asks to wait {now.waiting_s:,.0f} s")
    parts += [f"{count:,} {kind}" for kind, count in now.unscored.items()]
    parts.append(f"{now.usage.tokens:,} tokens")
    if now.usage.cost:
        parts.append(f"cost {now.usage.cost:,.4f}")
    return Shown("labels", now.done, now.total, ", ".join(parts))


def _print_result(result: "LabelResult") -> None:
    summary = result.summary
    typer.echo(f"labelled: {result.out}")
    for model, counts in summary["counts"].items():
        unscored = "".join(f", {kind} {count:,}" for kind, count in counts["detail"].items())
        typer.echo(f"  {model}: scored {counts['status'].get('scored', 0):,}{unscored}")
    usage = summary["usage"]
    tokens = usage["prompt_tokens"] + usage["completion_tokens"]
    typer.echo(f"  tokens {tokens:,}, cost {usage['cost']:,.4f}")
    run = summary["run"]
    failures = "".join(f", {kind} {count:,}" for kind, count in run["failures"].items())
    typer.echo(f"  {run['requests']:,} requests, {run['replies_per_s']:,.0f} replies/s{failures}")
    if result.stopped_by == "interrupted":
        typer.echo("stopped; run the same command again to go on", err=True)
        raise KeyboardInterrupt
    if result.stopped_by is not None:
        typer.echo(f"stopped by --{result.stopped_by}; raise it to go on", err=True)
