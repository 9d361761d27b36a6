"""Frozen encoders behind one protocol: hashed n-grams, ONNX models, Hugging Face models.

| specification | what it is | needs |
|---|---|---|
| `hashed` | hashed words, word pairs and byte n-grams, with surface statistics | nothing more |
| `onnx:FOLDER` | a sentence encoder: model.onnx and tokenizer.json | the extra `onnx` |
| `hf:MODEL` | a Hugging Face encoder, masked mean of its last states | the extras `hf`, `torch` |
| `causal:MODEL:LAYER` | a causal model's hidden states after a layer, mean pooled | the same |
"""

from nmoe_data.errors import DataError
from nmoe_data.hydra.encoder.contract import Encoder, FloatArray, FloatMatrix, TokenEncoder
from nmoe_data.hydra.extras import extra

__all__ = ["Encoder", "FloatArray", "FloatMatrix", "TokenEncoder", "open_encoder"]

NEURAL_EXTRAS = "hf,torch"
REMEDY = "name hashed, onnx:FOLDER, hf:MODEL or causal:MODEL:LAYER"


def open_encoder(spec: str, *, device: str = "cpu", dtype: str = "float32") -> Encoder:
    """Opens an encoder by its specification (see the head of this module).

    device: where a neural one computes ("cpu", "cuda", "cuda:1"). dtype: in what ("float32",
    "bfloat16", "float16"); features are float32 in any case.
    Raises DataError: E-HYDRA-ENCODER for a specification, folder, device or dtype that cannot be
    used, E-HYDRA-EXTRA for a library that is not installed.
    """
    kind, _, rest = spec.partition(":")
    if spec == "hashed":
        from nmoe_data.hydra.encoder.hashed import HashedEncoder

        return HashedEncoder()
    if kind == "onnx" and rest:
        from nmoe_data.hydra.encoder.onnx import open_onnx

        return open_onnx(rest, device=device)
    if kind == "hf" and rest:
        with extra(NEURAL_EXTRAS):
            from nmoe_data.hydra.encoder.huggingface import open_bidirectional

        return open_bidirectional(rest, device=device, dtype=dtype)
    model, _, layer = rest.rpartition(":")
    if kind == "causal" and model and layer.isdecimal():
        with extra(NEURAL_EXTRAS):
            from nmoe_data.hydra.encoder.huggingface import open_causal

        return open_causal(model, int(layer), device=device, dtype=dtype)
    raise DataError("E-HYDRA-ENCODER", f"{spec!r} names no encoder", REMEDY)
