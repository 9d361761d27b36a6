"""The encoder `onnx:FOLDER`: a sentence encoder as model.onnx with its tokenizer.json.

The graph takes input_ids and attention_mask (and token_type_ids, all zero, if it has that input).
An output of two axes is taken as it is; of three, the mean over a document's tokens.

Letters: B documents of a batch, L tokens of the longest, W width.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from nmoe_data.hydra.encoder.batching import (
    MAX_TOKENS,
    BatchTokenizer,
    TokenBatch,
    folder_hash,
    masked_mean,
    unusable,
)
from nmoe_data.hydra.encoder.contract import FloatArray
from nmoe_data.hydra.extras import extra

MODEL_NAME = "model.onnx"
TOKENIZER_NAME = "tokenizer.json"
# model.onnx_data and the like hold weights beside a large graph.
HASHED_FILES = ("model.onnx*", TOKENIZER_NAME)
BATCH_TOKENS = 8192
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
REMEDY = f"name a folder with {MODEL_NAME} and {TOKENIZER_NAME}"


def open_onnx(folder: str, *, device: str = "cpu") -> "OnnxEncoder":
    """Opens the sentence encoder in a folder.

    Raises DataError: E-HYDRA-ENCODER if it lacks a file, cannot be loaded, or has other inputs or
    outputs; E-HYDRA-EXTRA if onnxruntime is not installed.
    """
    with extra("onnx"):
        import onnxruntime

    name, path = f"onnx:{folder}", Path(folder)
    for file in (MODEL_NAME, TOKENIZER_NAME):
        if not (path / file).is_file():
            raise unusable(name, f"{path / file} is missing", REMEDY)
    kind, _, number = device.partition(":")
    provider = PROVIDERS.get(kind)
    if provider not in onnxruntime.get_available_providers():
        raise unusable(name, f"this onnxruntime has no {device}", "install onnxruntime-gpu, or cpu")
    options = onnxruntime.SessionOptions()
    # onnxruntime does not read this variable itself; worker processes share the cores by it.
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
    provider_options = {"device_id": number} if number else {}
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path / TOKENIZER_NAME))
        session = onnxruntime.InferenceSession(
            str(path / MODEL_NAME), options, providers=[(provider, provider_options)]
        )
    # Both libraries raise classes of their own that derive from Exception alone.
    except Exception as error:
        raise unusable(name, f"cannot be loaded ({error})", REMEDY) from error
    return OnnxEncoder(name, path, session, tokenizer, device)


class OnnxEncoder:
    """An encoder by onnxruntime; made by `open_onnx`."""

    dtype = "float32"

    def __init__(
        self, name: str, folder: Path, session: Any, tokenizer: tokenizers.Tokenizer, device: str
    ) -> None:
        self.name = name
        self.device = device
        self._session = session
        self._inputs = {entry.name for entry in session.get_inputs()}
        self._output = session.get_outputs()[0].name
        known = {"input_ids", "attention_mask", "token_type_ids"}
        if not {"input_ids", "attention_mask"} <= self._inputs <= known:
            what = f"takes {', '.join(sorted(self._inputs))}"
            raise unusable(name, what, "export it with input_ids and attention_mask")
        padding = tokenizer.padding or {"pad_id": 0}
        limit = min(MAX_TOKENS, (tokenizer.truncation or {}).get("max_length", MAX_TOKENS))
        self._tokenizer = BatchTokenizer(tokenizer, limit, padding["pad_id"], BATCH_TOKENS)
        self.hash = folder_hash(folder, HASHED_FILES, f"nmoe-data onnx 1 {limit} {self._output}")
        self.width = self._pooled(next(self._tokenizer.batches(["width"]))).shape[1]

    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Returns float32 [N, W], in the order of `texts`."""
        result = np.empty((len(texts), self.width), np.float32)
        for batch in self._tokenizer.batches(texts):
            result[batch.rows] = self._pooled(batch)
        return result

    def _pooled(self, batch: TokenBatch) -> FloatArray:
        feed = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if "token_type_ids" in self._inputs:
            feed["token_type_ids"] = np.zeros_like(batch.ids)
        (states,) = self._session.run([self._output], feed)
        if states.ndim not in (2, 3) or len(states) != len(batch.ids):
            remedy = "export it with an output [documents, width] or [documents, tokens, width]"
            raise unusable(self.name, f"gives an output of shape {states.shape}", remedy)
        states = states.astype(np.float32)
        return states if states.ndim == 2 else masked_mean(states, batch.mask)
