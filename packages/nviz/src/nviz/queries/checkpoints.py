"""What a checkpoint holds, put together: bytes by part of the model, tensors by words."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nviz.store.checkpoints import Tensor

BYTES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one kind: how many, their numbers, their bytes (one a number where unknown)."""

    name: str
    tensors: int
    elements: int
    bytes: int


def part_of(name: str) -> str:
    """Which part of the training state a tensor belongs to, by words in its name."""
    words = name.split(".")
    state = next((word for word in words if word in ("exp_avg", "exp_avg_sq", "master")), None)
    if "optimizer" in words or state:
        return f"optimizer, {state}" if state else "optimizer"
    for word, part in (
        ("router", "router"),
        ("shared", "shared experts"),
        ("experts", "routed experts"),
        ("attention", "attention"),
        ("mlp", "dense layers"),
    ):
        if word in words:
            return part
    if any("embed" in word or word in ("head", "lm_head", "output") for word in words):
        return "embedding and output"
    return "norms and the rest"


def parts(tensors: Iterable[Tensor]) -> list[Part]:
    """Tensors by part, the largest part first."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[part_of(tensor.name)].append(tensor)
    summed = [
        Part(name, len(items), sum(t.elements for t in items), sum(bytes_of(t) for t in items))
        for name, items in found.items()
    ]
    return sorted(summed, key=lambda part: (-part.bytes, part.name))


def bytes_of(tensor: Tensor) -> int:
    """Size of a tensor's body; types of one byte and unknown ones count one byte a number."""
    return tensor.elements * BYTES.get(tensor.dtype, 1)


def matching(tensors: Iterable[Tensor], words: str) -> list[Tensor]:
    """Tensors whose name, file or dtype holds every word, case ignored, in their order."""
    wanted = words.lower().split()
    return [
        tensor
        for tensor in tensors
        if all(word in f"{tensor.name} {tensor.file} {tensor.dtype}".lower() for word in wanted)
    ]
