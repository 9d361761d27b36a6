"""The `nmoe-data` command: prep, verify, info, inspect, tokenizer train, hydra.

Heavy modules are imported inside the commands, so that `--help` starts at once. Every DataError
becomes one line on stderr and exit code 2; Ctrl-C exits with 130.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nmoe_data import __version__
from nmoe_data.console import Shown, log_to_stderr, shown_progress
from nmoe_data.errors import DataError
from nmoe_data.files import os_errors
from nmoe_data.hydra.commands import hydra_app

if TYPE_CHECKING:
    from nmoe_data.prep import PrepProgress, PrepResult
    from nmoe_data.shards import Manifest

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
tokenizer_app = typer.Typer(
    help="Train tokenizers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(hydra_app, name="hydra")

INTERRUPTED = 130

Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Folders, files, or python-stdlib.")
]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Text to token shards, checked and traceable."""


@app.command("prep")
def prep_command(
    sources: Sources,
    out: Annotated[Path, typer.Option("--out", help="Folder to make; a stopped run goes on.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, the path of a tokenizer.json, or bpe:N to train one.")
    ] = "bpe:4096",
    held_out: Annotated[float, typer.Option(help="Share of documents to hold out.")] = 0.05,
    shard_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a shard (default 67,108,864).")
    ] = None,
    text_field: TextField = "text",
    limit_bytes: Annotated[
        int | None, typer.Option(help="Stop after so many bytes of text.")
    ] = None,
) -> None:
    """Turn text into token shards; run the same command again to resume."""
    from nmoe_data.prep import DEFAULT_SHARD_TOKENS, prep

    try:
        with shown_progress(_shown) as progress:
            result = prep(
                sources,
                out,
                tokenizer=tokenizer,
                held_out=held_out,
                shard_tokens=DEFAULT_SHARD_TOKENS if shard_tokens is None else shard_tokens,
                limit_bytes=limit_bytes,
                text_field=text_field,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo("stopped; run the same command again to go on", err=True)
        raise
    _print_result(result)


def _shown(now: "PrepProgress") -> Shown:
    detail = f"{now.tokens:,} tokens, {now.rejected:,} rejected"
    return Shown("prep", now.bytes_done, now.bytes_total, detail, in_bytes=True)


def _print_result(result: "PrepResult") -> None:
    rejected = sum(result.rejected.values())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in result.rejected.items())
    typer.echo(f"{'already prepared' if result.reused else 'prepared'}: {result.out}")
    typer.echo(f"  train     {result.train_tokens:,} tokens")
    if result.held_out is not None:
        typer.echo(f"  held-out  {result.held_out_tokens:,} tokens")
    typer.echo(f"  documents {result.documents:,}")
    typer.echo(f"  rejected  {rejected:,}" + (f" ({reasons})" if reasons else ""))


def _datasets(folder: Path) -> list[Path]:
    """Returns the dataset folders that `folder` is or holds.

    Raises DataError: E-DATASET-UNFINISHED, or those of `os_errors`.
    """
    with os_errors("read", folder):
        if (folder / "state.json").is_file():
            raise DataError(
                "E-DATASET-UNFINISHED",
                f"the run in {folder} is not finished",
                "run the same `nmoe-data prep` command again to go on",
            )
        inside = [folder / split for split in ("train", "held-out")]
        return [path for path in inside if (path / "manifest.json").is_file()] or [folder]


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="What prep wrote, or one split of it.")],
) -> None:
    """Check every hash, count, id and index row; exit 2 and name the shard if one is bad."""
    from nmoe_data.shards import find_problems, read_manifest

    problems: list[str] = []
    for path in _datasets(folder):
        found = find_problems(path)
        problems += found
        if not found:
            manifest = read_manifest(path)
            typer.echo(f"{path}: {len(manifest.shards)} shards, {manifest.tokens:,} tokens, whole")
    for problem in problems:
        typer.echo(f"error {problem}", err=True)
    if problems:
        raise typer.Exit(2)


@app.command("info")
def info_command(
    folder: Annotated[Path, typer.Argument(help="What prep wrote, or one split of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifests as JSON.")] = False,
) -> None:
    """Say what a dataset holds and where it came from."""
    from dataclasses import asdict

    import orjson

    from nmoe_data.shards import read_manifest

    manifests = {str(path): read_manifest(path) for path in _datasets(folder)}
    if as_json:
        content = {path: asdict(manifest) for path, manifest in manifests.items()}
        typer.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        return
    for path, manifest in manifests.items():
        _print_manifest(path, manifest)


def _print_manifest(path: str, manifest: "Manifest") -> None:
    rejected = manifest.counts["rejected"]
    typer.echo(path)
    typer.echo(f"  tokens     {manifest.tokens:,} ({manifest.dtype})")
    typer.echo(f"  documents  {manifest.documents:,}")
    typer.echo(f"  shards     {len(manifest.shards)}")
    typer.echo(f"  tokenizer  {manifest.tokenizer['name']}, {manifest.tokenizer['vocab_size']} ids")
    typer.echo(f"  sources    {len(manifest.sources):,} files")
    typer.echo(f"  rejected   {sum(rejected.values()):,} {rejected or ''}")
    typer.echo(f"  command    {manifest.command}")


@app.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(help="What prep wrote, or one split of it.")],
    document: Annotated[int, typer.Option(help="Number of the document, from 0.")] = 0,
) -> None:
    """Print the text of a document and where it came from (of OUT: the train split)."""
    from nmoe_data.inspect import find_document

    found = find_document(_datasets(folder)[0], document)
    typer.echo(f"document {document}: {found.shard}, tokens {found.start}..{found.end}", err=True)
    typer.echo(f"from {found.source}, record at {found.offset}, id {found.id:016x}", err=True)
    typer.echo(found.text)


@tokenizer_app.command("train")
def tokenizer_train_command(
    sources: Sources,
    vocab_size: Annotated[int, typer.Option(help="Ids, the end of a document included.")],
    out: Annotated[Path, typer.Option("--out", help="The tokenizer.json to write.")],
    sample_bytes: Annotated[int, typer.Option(help="Text to learn from, at most.")] = 4 << 20,
    text_field: TextField = "text",
) -> None:
    """Train a byte-level BPE on a sample of the sources."""
    from nmoe_data.sources import list_files, sample_texts
    from nmoe_data.tokenizer import train_bpe

    log_to_stderr()
    texts = sample_texts(list_files(sources, [out]), sample_bytes, 0, text_field)
    tokenizer = train_bpe(texts, vocab_size)
    tokenizer.save(out)
    typer.echo(f"{out}: {tokenizer.vocab_size} ids, hash {tokenizer.hash[:16]}")


def main() -> None:
    """Runs the command line; a problem the user can mend is one line and exit code 2."""
    try:
        app()
    except DataError as error:
        typer.echo(f"error {error}", err=True)
        sys.exit(2)
    except SystemExit as end:
        # Typer has turned an interrupt inside a command into this code.
        if end.code == INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except BrokenPipeError:
        # The reader of our output is gone; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
