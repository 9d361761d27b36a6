"""What a run tells its caller, on the way and at the end, and the names of what it makes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nmoe_data.shards import Manifest

TRAIN, HELD_OUT = "train", "held-out"
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class PrepProgress:
    """How far a run is; `bytes_done` of `bytes_total` are of source files on disk, or of text when
    the run is limited."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    rejected: int


@dataclass(frozen=True, slots=True)
class PrepResult:
    """What a finished run made; `reused` says that it had been finished before."""

    out: Path
    train: Path
    held_out: Path | None
    tokenizer: Path
    train_tokens: int
    held_out_tokens: int
    documents: int
    rejected: dict[str, int]
    reused: bool


Progress = Callable[[PrepProgress], None]


def describe_result(out: Path, manifests: dict[str, Manifest], *, reused: bool) -> PrepResult:
    """Returns what the manifests of a finished run say."""
    held_out = manifests.get(HELD_OUT)
    return PrepResult(
        out=out,
        train=out / TRAIN,
        held_out=out / HELD_OUT if held_out else None,
        tokenizer=out / TOKENIZER_NAME,
        train_tokens=manifests[TRAIN].tokens,
        held_out_tokens=held_out.tokens if held_out else 0,
        documents=sum(manifest.documents for manifest in manifests.values()),
        rejected=manifests[TRAIN].counts["rejected"],
        reused=reused,
    )
