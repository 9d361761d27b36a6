"""Neural encoders of HYDRA: documents a second, with and without tokenisation, share of the peak.

    python infra/bench/hydra.py --device cuda --json infra/bench/results/hydra-h200.json
    python infra/bench/hydra.py --device cpu --small

Models are built from a configuration with random weights (speed does not depend on their values),
tokenizers are trained on Python's own sources, and documents are pieces of these. What is timed is
the class that `hydra train` and `hydra filter` use. Before that its rows in half precision are
compared with those in float32 on the same device: norm of the difference over norm; one that is off
is not timed. FLOPs are those of the documents' own tokens, padding excluded: 2 per weight and
token, and attention's products; the peak is a dense product in the same type on the same device.

Letters: L tokens of a document, H width, F width of the feed-forward part.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from nmoe_data.hydra.encoder.huggingface import HfEncoder

MAX_TOKENS = 512
VOCABULARY = 16384
TOLERANCE = 3e-2
CHECKED_DOCUMENTS = 256
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "nmoe-data")


@dataclass(frozen=True)
class Model:
    """A network from a configuration. causal: the first layers of a causal model, or an encoder."""

    name: str
    width: int
    layers: int
    heads: int
    feed_forward: int
    causal: bool

    def build(self, dtype: torch.dtype) -> torch.nn.Module:
        """The network with weights that are the same each time."""
        torch.manual_seed(0)
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.feed_forward,
        }
        if self.causal:
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=self.heads // 4)
            return transformers.LlamaModel(config).to(dtype)
        config = transformers.BertConfig(**sizes, max_position_embeddings=MAX_TOKENS)
        return transformers.BertModel(config, add_pooling_layer=False).to(dtype)

    def flops(self, lengths: np.ndarray) -> float:
        """Of documents of these lengths."""
        keys = self.width // 4 if self.causal else self.width
        attention_weights = 2 * self.width * self.width + 2 * self.width * keys
        weights = attention_weights + (3 if self.causal else 2) * self.width * self.feed_forward
        # Scores and their use; a causal mask leaves half of both.
        products = (2 if self.causal else 4) * self.width * np.square(lengths, dtype=float)
        return float(self.layers * (2 * weights * lengths + products).sum())


MODELS = (
    Model("bert-110m", 768, 12, 12, 3072, causal=False),
    Model("causal-1b, 8 of 16 layers", 2048, 8, 32, 8192, causal=True),
)
SMALL_MODELS = (
    Model("bert-small", 64, 2, 4, 256, causal=False),
    Model("causal-small", 64, 2, 4, 256, causal=True),
)


def documents(count: int) -> list[str]:
    """Pieces of Python's own sources, 400 to 6,000 characters, short ones more often."""
    draw = random.Random(0)
    pieces: list[str] = []
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if path.parent.name in ("site-packages", "dist-packages"):
            continue
        text, start = path.read_text(errors="replace"), 0
        while start < len(text):
            size = int(math.exp(draw.uniform(math.log(400), math.log(6000))))
            pieces.append(text[start : start + size])
            start += size
    draw.shuffle(pieces)
    return [pieces[at % len(pieces)] for at in range(count)]


def trained_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of these texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["[PAD]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def seconds_of(work: Callable[[], object], device: str, repeats: int) -> list[float]:
    """How long each of `repeats` calls took, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        started_s = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - started_s)
    return times[1:]


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_tflops(device: str, dtype: torch.dtype, size: int, repeats: int) -> float:
    """Of a dense product of square matrices, the best of several."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            a @ b

    return 10 * 2.0 * size**3 / min(seconds_of(products, device, repeats)) / 1e12


def encoder_of(model: Model, tokenizer: object, device: str, dtype: torch.dtype) -> HfEncoder:
    """The encoder as `open_encoder` makes it, but from a configuration."""
    network = model.build(dtype)
    return HfEncoder(model.name, "", network, tokenizer, MAX_TOKENS, device, causal=model.causal)


def relative_error(
    model: Model, tokenizer: object, device: str, dtype: torch.dtype, texts: list[str]
) -> float:
    """Rows in `dtype` against rows in float32."""
    # Full float32 products, so that the truth is one.
    torch.backends.cuda.matmul.allow_tf32 = False
    truth = encoder_of(model, tokenizer, device, torch.float32).encode(texts)
    rows = encoder_of(model, tokenizer, device, dtype).encode(texts)
    return float(np.linalg.norm(rows - truth) / np.linalg.norm(truth))


def measure(
    model: Model,
    tokenizer: object,
    texts: list[str],
    device: str,
    dtype: torch.dtype,
    peak: float,
    repeats: int,
) -> dict[str, object]:
    """A row of the report: verified, then timed with and without tokenisation."""
    name = str(dtype).removeprefix("torch.")
    row: dict[str, object] = {**asdict(model), "encoder": model.name, "dtype": name}
    row["error"] = error = relative_error(
        model, tokenizer, device, dtype, texts[:CHECKED_DOCUMENTS]
    )
    if not error <= TOLERANCE:
        return {**row, "note": f"wrong: the error is above {TOLERANCE:g}, not timed"}
    encoder = encoder_of(model, tokenizer, device, dtype)
    batches = list(encoder.batches(texts))
    lengths = np.concatenate([batch.mask.sum(axis=1) for batch in batches])
    padded = sum(batch.ids.size for batch in batches)
    flops = model.flops(lengths)
    row |= {
        "parameters": sum(weight.numel() for weight in model.build(dtype).parameters()),
        "documents": len(texts),
        "tokens": int(lengths.sum()),
        "padding": 1 - int(lengths.sum()) / padded,
        "tflop": flops / 1e12,
        "peak_tflops": peak,
        "note": "",
    }
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    works: dict[str, Callable[[], object]] = {
        "end_to_end": lambda: encoder.encode(texts),
        "tokenised": lambda: encoder.encode_batches(iter(batches), len(texts)),
        "tokenisation": lambda: list(encoder.batches(texts)),
    }
    for part, work in works.items():
        times = seconds_of(work, device, repeats)
        middle = statistics.median(times)
        row |= {
            f"{part}_s": middle,
            f"{part}_min_s": min(times),
            f"{part}_max_s": max(times),
            f"{part}_documents_per_s": len(texts) / middle,
        }
        if part != "tokenisation":
            row |= {
                f"{part}_tflops": flops / middle / 1e12,
                f"{part}_share": flops / middle / 1e12 / peak,
            }
    if device.startswith("cuda"):
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def hardware(device: str) -> dict[str, object]:
    """The machine and the versions, as every report here has them."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "from source"
    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "CPU",
        "cuda": torch.version.cuda if is_cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Measures each model in each type."""
    count = options.documents or (128 if options.small else 16384)
    halves = "bfloat16,float16" if options.device.startswith("cuda") else "float32"
    texts = documents(count)
    tokenizer = trained_tokenizer(texts[:4096])
    for dtype_name in (options.dtypes or halves).split(","):
        dtype = getattr(torch, dtype_name)
        peak = peak_tflops(options.device, dtype, 512 if options.small else 8192, options.repeats)
        for model in SMALL_MODELS if options.small else MODELS:
            yield measure(model, tokenizer, texts, options.device, dtype, peak, options.repeats)


def main() -> None:
    """Prints a line for each row and writes the report after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", help="of torch, by comma; half precision where it is fast")
    parser.add_argument("--small", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--documents", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {"hardware": hardware(options.device), "repeats": options.repeats, "rows": []}
    for row in rows(options):
        report["rows"].append(row)
        print(line_of(row), flush=True)  # noqa: T201 - a program, not a library
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def line_of(row: dict[str, object]) -> str:
    """A row for people."""
    head = f"{row['encoder']} {row['dtype']}: error {row['error']:.1e}"
    if row["note"]:
        return f"{head}, {row['note']}"
    return (
        f"{head}, {row['end_to_end_documents_per_s']:,.0f} documents/s end to end, "
        f"{row['tokenised_documents_per_s']:,.0f} tokenised, "
        f"{row['tokenisation_documents_per_s']:,.0f} tokenisation alone; "
        f"{row['end_to_end_tflops']:.1f} and {row['tokenised_tflops']:.1f} TFLOP/s, "
        f"{row['tokenised_share']:.0%} of {row['peak_tflops']:.0f}"
    )


if __name__ == "__main__":
    main()
