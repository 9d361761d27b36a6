"""The sizes that are measured: presets by name, or numbers with commas.

Letters: T tokens, H width, I expert width, E experts, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeVar

from nmoe_kernels.errors import KernelError

LETTERS = {"tokens": "T", "width": "H", "expert_width": "I", "experts": "E", "top_k": "K"}


def _check(sizes: tuple[int, ...], width: int, experts: int, top_k: int) -> None:
    if min(sizes) < 1:
        raise ValueError("every size is 1 or more")
    if top_k > experts:
        raise ValueError(f"a token cannot have {top_k} of {experts} experts")
    if experts > width:
        raise ValueError(f"{experts} experts need a width of {experts} or more")


@dataclass(frozen=True)
class RouterShape:
    """Sizes of a router and of its input: T, H, E, K. Raises ValueError for sizes that cannot be.

    E may not pass H: the benchmark gives every expert a direction of its own in a token.
    """

    tokens: int
    width: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        _check(astuple(self), self.width, self.experts, self.top_k)

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)))


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of its input: T, H, I, E, K. Raises ValueError as `RouterShape`."""

    tokens: int
    width: int
    expert_width: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        _check(astuple(self), self.width, self.experts, self.top_k)

    @property
    def router(self) -> RouterShape:
        """The sizes of its router."""
        return RouterShape(self.tokens, self.width, self.experts, self.top_k)

    @property
    def rows(self) -> int:
        """Assignments of a token to an expert."""
        return self.tokens * self.top_k

    def __str__(self) -> str:
        return ",".join(map(str, astuple(self)))


S = TypeVar("S", RouterShape, Shape)

LAYERS: Mapping[str, Shape] = {
    "h4096-e128": Shape(32768, 4096, 1024, 128, 8),
    "h2048-e64": Shape(32768, 2048, 1024, 64, 8),
    "h2048-k6": Shape(32768, 2048, 1408, 64, 6),
    "fine": Shape(24576, 1536, 256, 128, 8),
    "h7168-e64": Shape(8192, 7168, 2048, 64, 8),
    "tiny": Shape(1024, 256, 128, 16, 4),
}
"""Presets of the layer and its products. All but `tiny`, which is for CPUs, are measured on a GPU
unless others are named."""

# Sizes that moe-engine published figures for.
PUBLISHED: Mapping[str, RouterShape] = {
    "engine-s1": RouterShape(512, 256, 16, 2),
    "engine-s2": RouterShape(1024, 512, 32, 2),
    "engine-s3": RouterShape(2048, 1024, 64, 2),
    "engine-s4": RouterShape(4096, 2048, 64, 4),
}
ROUTERS: Mapping[str, RouterShape] = {
    **PUBLISHED,
    **{name: shape.router for name, shape in LAYERS.items()},
    "h7168-e256": RouterShape(32768, 7168, 256, 8),
}
"""Presets of the router."""


def parse_shapes(
    texts: Sequence[str] | None, kind: type[S], presets: Mapping[str, S], device: str
) -> list[S]:
    """Shapes from presets' names and from numbers with commas; with none, those of the device.

    Raises KernelError E-BENCH.
    """
    if not texts:
        wanted = [name for name in presets if (name == "tiny") == (device == "cpu")]
        return [presets[name] for name in wanted]
    return [presets.get(text) or _from_numbers(text, kind, presets) for text in texts]


def _from_numbers(text: str, kind: type[S], presets: Mapping[str, S]) -> S:
    try:
        return kind(*(int(number) for number in text.split(",")))
    except (ValueError, TypeError) as error:
        letters = ",".join(LETTERS[field.name] for field in fields(kind))
        reason = error if isinstance(error, ValueError) and "," in text else "it is no preset"
        raise KernelError(
            "E-BENCH",
            f"the shape {text!r} cannot be ({reason})",
            f"write {letters} in numbers, or one of {', '.join(presets)}",
        ) from None
