"""The encoders `hf:MODEL` and `causal:MODEL:LAYER`: frozen Hugging Face models by PyTorch.

`hf` takes the mean of a bidirectional model's last states over a document's tokens. `causal` loads
the first LAYER layers of a causal model alone, and takes the mean of what its final norm makes of
their output; so a large model serves as a backbone at the price of the layers that are used.

Padding takes no part in attention nor in the mean. Documents of like length share a batch,
attention is PyTorch's fused one, the next window is tokenised while the device works, and results
are fetched once in many batches, so that the device hardly waits for a copy.

Letters: N documents, B of a batch, L tokens of the longest, W width.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from nmoe_data.hydra.encoder.batching import (
    MAX_TOKENS,
    BatchTokenizer,
    IdArray,
    TokenBatch,
    folder_hash,
    unusable,
)
from nmoe_data.hydra.encoder.contract import FloatArray

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HASHED_FILES = ("config.json", "tokenizer*.json", "*.safetensors", "pytorch_model*.bin", "vocab*")
FETCHED_FILES = (*HASHED_FILES, "*.index.json", "merges.txt", "special_tokens_map.json")
BATCH_TOKENS = {"cuda": 1 << 16, "cpu": 1 << 12}
# Batches on the device before their results are fetched.
KEPT_BATCHES = 64
REMEDY = "name a folder or a hub model that transformers can load"


def open_bidirectional(model: str, *, device: str = "cpu", dtype: str = "float32") -> "HfEncoder":
    """Opens the encoder `hf:MODEL`; MODEL is a folder or a name on the hub.

    Raises DataError: E-HYDRA-ENCODER if model, device or dtype cannot be used.
    """
    return _open(f"hf:{model}", model, None, device, dtype)


def open_causal(
    model: str, layer: int, *, device: str = "cpu", dtype: str = "float32"
) -> "HfEncoder":
    """Opens the encoder `causal:MODEL:LAYER`; LAYER counts from 1 to the number of layers.

    Raises DataError: E-HYDRA-ENCODER if model, layer, device or dtype cannot be used.
    """
    return _open(f"causal:{model}:{layer}", model, layer, device, dtype)


def _open(name: str, model: str, layer: int | None, device: str, dtype: str) -> "HfEncoder":
    if dtype not in DTYPES:
        raise unusable(name, f"no dtype {dtype}", f"give one of {', '.join(DTYPES)}")
    try:
        folder = _folder(model)
        config = transformers.AutoConfig.from_pretrained(folder)
        if layer is not None:
            config = _shortened(name, config, layer)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=True)
        network = _load(name, folder, config, DTYPES[dtype])
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = " ".join(str(error).split())[:300]
        raise unusable(name, f"cannot be loaded ({what})", REMEDY) from error
    positions = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    limit = min(MAX_TOKENS, tokenizer.model_max_length, positions)
    hash = folder_hash(folder, HASHED_FILES, f"nmoe-data hf 1 {layer} {limit}")
    return HfEncoder(name, hash, network, tokenizer, limit, device, causal=layer is not None)


def _folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=list(FETCHED_FILES)))


def _load(name: str, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """Returns the network; one with a weight missing is an error, as transformers would draw it."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        network, found = transformers.AutoModel.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    # The pooler is not used, and many checkpoints have none.
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    if missing or found["mismatched_keys"]:
        what = f"{folder} lacks {len(missing)} weights, such as {missing[:1]}"
        raise unusable(name, what, "name a folder whose weights fit its config.json")
    return network


def _shortened(name: str, config: Any, layer: int) -> Any:
    """Returns the configuration of the model's first `layer` layers."""
    layers = config.num_hidden_layers
    if not 1 <= layer <= layers:
        raise unusable(name, f"it has {layers} layers", f"give a layer from 1 to {layers}")
    config = copy.deepcopy(config)
    config.num_hidden_layers = layer
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layer]
    return config


class HfEncoder:
    """A frozen model with its tokenizer on a device.

    network: maps input_ids and attention_mask to last_hidden_state [B, L, W]. tokenizer: a fast one
    of transformers. max_tokens: of a document. causal: a token never sees a later one.

    Raises DataError: E-HYDRA-ENCODER if the tokenizer is no fast one or the device is not there.
    """

    def __init__(
        self,
        name: str,
        hash: str,
        network: Any,
        tokenizer: Any,
        max_tokens: int,
        device: str,
        causal: bool,
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise unusable(name, "it has no fast tokenizer", "convert it to tokenizer.json")
        try:
            self._network = network.to(device).eval()
        except (RuntimeError, AssertionError) as error:
            what = " ".join(str(error).split())[:200]
            raise unusable(name, f"no device {device} ({what})", "give --device cpu") from error
        self.name = name
        self.hash = hash
        self.width = int(network.config.hidden_size)
        self.device = device
        self.dtype = str(network.dtype).removeprefix("torch.")
        self._device = torch.device(device)
        self._causal = causal
        self._max_tokens = max_tokens
        self._backend = backend
        self._pad_id = tokenizer.pad_token_id or 0
        self._tokenizers: dict[int, BatchTokenizer] = {}

    def batches(self, texts: Sequence[str], max_tokens: int | None = None) -> Iterator[TokenBatch]:
        """Yields `texts` tokenised, as `encode_batches` takes them."""
        limit = min(max_tokens or self._max_tokens, self._max_tokens)
        if limit not in self._tokenizers:
            own = copy.deepcopy(self._backend)
            budget = BATCH_TOKENS.get(self._device.type, BATCH_TOKENS["cpu"])
            self._tokenizers[limit] = BatchTokenizer(own, limit, self._pad_id, budget)
        return self._tokenizers[limit].batches(texts)

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Returns float32 [N, W], in the order of `texts`."""
        return self.encode_batches(self.batches(texts), len(texts))

    def encode_batches(self, batches: Iterable[TokenBatch], count: int) -> FloatArray:
        """Returns float32 [N, W] of batches that hold N = `count` texts in all."""
        result = np.empty((count, self.width), np.float32)
        rows: list[IdArray] = []
        pooled: list[Tensor] = []
        with torch.inference_mode():
            for batch in batches:
                rows.append(batch.rows)
                pooled.append(_pooled(*self._states(batch)))
                if len(rows) == KEPT_BATCHES:
                    result[np.concatenate(rows)] = torch.cat(pooled).cpu().numpy()
                    rows, pooled = [], []
            if rows:
                result[np.concatenate(rows)] = torch.cat(pooled).cpu().numpy()
        return result

    def token_states(self, texts: Sequence[str], max_tokens: int) -> list[FloatArray]:
        """Returns float32 [L_n, W] per text, in the order of `texts`."""
        result: dict[int, FloatArray] = {}
        with torch.inference_mode():
            for batch in self.batches(texts, max_tokens):
                states = self._states(batch)[0].float().cpu().numpy()
                for row, part, mask in zip(batch.rows, states, batch.mask, strict=True):
                    result[int(row)] = part[: mask.sum()].copy()
        return [result[row] for row in range(len(texts))]

    def _states(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        ids, mask = self._on_device(batch.ids), self._on_device(batch.mask)
        # Padding comes last, where causal attention never looks; without a mask it is fastest.
        unmasked = self._causal or batch.is_full
        attended = None if unmasked else mask
        return self._network(input_ids=ids, attention_mask=attended).last_hidden_state, mask

    def _on_device(self, array: IdArray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        # From pinned memory the copy does not hold up the launches after it.
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean [B, W] in float32 of states [B, L, W] where mask [B, L] is 1."""
    weights = mask.unsqueeze(-1).float()
    return (states.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
