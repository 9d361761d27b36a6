"""Encoders: the bundled one against a plain reading of its definition, neural ones alone."""

import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from nmoe_data.errors import DataError
from nmoe_data.hydra.encoder import Encoder, TokenEncoder, batching, open_encoder
from nmoe_data.hydra.encoder import hashed as definition
from nmoe_data.hydra.encoder.hashed import HashedEncoder
from nmoe_data.hydra.encoder.huggingface import HfEncoder
from tiny_models import LONGEST, VOCABULARY, corpus, make_tokenizer, write_bert, write_llama

MASK64 = 2**64 - 1
TEXTS = [
    "The router sends a token, and a token again, to 8 experts.\nThe End.\n",
    "def f(x):\n\treturn x_1 + 2  # naïve café 日本語 🙂\n",
    "",
    "?",
    "!? ,;",
    "word",
    "ÀÉÎ",
    "\n\n\n",
    "two words",
    "x" * 300,
    "UPPER lower UPPER",
]


def plain_row(text: str) -> np.ndarray:
    """What the head of hashed.py says, word by word, in whole numbers of Python."""
    data = text[: definition.MAX_CHARACTERS].encode()
    lower = data.lower()
    is_word = [byte >= 128 or chr(byte).isalnum() or byte == ord("_") for byte in data]
    words: list[bytes] = []
    for at, inside in enumerate(is_word):
        if inside and (at == 0 or not is_word[at - 1]):
            words.append(b"")
        if inside:
            words[-1] += lower[at : at + 1]

    def polynomial(word: bytes) -> int:
        return sum(b * pow(definition.BASE, j, 2**64) for j, b in enumerate(word)) & MASK64

    def column(hash: int) -> int:
        return (((hash ^ (hash >> 32)) * int(definition.MIX)) & MASK64) >> 48

    hashes = [polynomial(word) for word in words]
    pairs = [(one * int(definition.PAIR) + other) & MASK64 for one, other in pairwise(hashes)]
    grams = [int.from_bytes(lower[at : at + 3], "little") for at in range(len(lower) - 2)]
    gram_columns = [((gram * int(definition.GRAM_MIX)) & (2**32 - 1)) >> 19 for gram in grams]
    word_block = plain_block(Counter(map(column, hashes + pairs)), 1 << 16)
    gram_block = plain_block(Counter(gram_columns), 1 << 13)
    size = max(len(data), 1)
    shares = np.array([lower.count(bytes([byte])) / size for byte in range(128)])
    lines = data.count(b"\n")
    count = max(len(words), 1)
    space = sum(byte in b" \t\r\v\f\n" for byte in data)
    letters = sum(byte < 128 and (chr(byte).isalnum() or byte == 95) for byte in data)
    non_ascii = sum(byte >= 128 for byte in data)
    values = {
        "log_bytes": math.log1p(len(data)),
        "bytes_per_word": sum(map(len, words)) / count,
        "distinct_words": np.count_nonzero(word_block) / max(2 * len(words) - 1, 1),
        "words_per_line": len(words) / (lines + 1),
        "long_words": sum(len(word) >= 8 for word in words) / count,
        "digits": sum(chr(byte) in "0123456789" for byte in data) / size,
        "capitals": sum(65 <= byte <= 90 for byte in data) / size,
        "punctuation": (len(data) - letters - non_ascii - space) / size,
        "white_space": space / size,
        "non_ascii": non_ascii / size,
        "line_breaks": lines / size,
        "distinct_grams": np.count_nonzero(gram_block) / size,
    }
    surface = [
        (values[name] - centre) / spread for name, (centre, spread) in definition.STATISTICS.items()
    ]
    return np.concatenate([word_block, gram_block, 3.0 * np.sqrt(shares), surface])


def plain_block(counts: Counter, width: int) -> np.ndarray:
    block = np.zeros(width)
    for at, count in counts.items():
        block[at] = math.log1p(count)
    return block / (np.linalg.norm(block) or 1.0)


def test_hashed_rows_are_what_the_definition_says() -> None:
    rows = open_encoder("hashed").encode(TEXTS).toarray()
    for text, row in zip(TEXTS, rows, strict=True):
        np.testing.assert_allclose(row, plain_row(text), atol=2e-6, err_msg=repr(text))


def test_hashed_definition_is_the_one_that_heads_were_trained_on() -> None:
    # A change of this hash makes every head useless that was trained before; so it is written here.
    encoder = open_encoder("hashed")
    assert encoder.hash[:16] == "7fe8304eb49b34c0"
    found = encoder.encode(TEXTS)
    assert (
        hashlib.sha256(found.indices.astype("<i4").tobytes()).hexdigest()[:16] == "53471e6172a4912e"
    )


def test_hashed_rows_depend_on_their_own_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    words = ["the", "a", "café", "日本", "x_1", "=", "(", ")", "\n", "def", "Return"]
    texts = [" ".join(draw.choices(words, k=draw.randint(0, 400))) for _ in range(60)] + TEXTS
    encoder = HashedEncoder()
    whole = encoder.encode(texts)
    for size in (1, 7, 64):
        parts = [encoder.encode(texts[at : at + size]) for at in range(0, len(texts), size)]
        assert (np.vstack([part.toarray() for part in parts]) == whole.toarray()).all()
    # Counting by sorting and by a table, and other cuts into batches, give the same bits.
    for name, value in (("DENSE_CELLS", 0), ("DENSE_CELLS", 1 << 40), ("BATCH_BYTES", 5000)):
        monkeypatch.setattr(definition, name, value)
        other = HashedEncoder().encode(texts)
        assert (other != whole).nnz == 0 and (other.indices == whole.indices).all()
    monkeypatch.setattr(definition, "BATCH_DOCUMENTS", 3)
    assert (HashedEncoder().encode(texts) != whole).nnz == 0


@pytest.mark.timeout(60)
def test_hashed_reads_a_bounded_prefix_of_a_huge_document() -> None:
    encoder = HashedEncoder()
    prefix = "日本語 words of a book " * 4000
    huge = prefix[: definition.MAX_CHARACTERS] + "never read " * 3_000_000
    rows = encoder.encode([huge, prefix[: definition.MAX_CHARACTERS], "short"])
    assert (rows[[0]] != rows[[1]]).nnz == 0
    assert (rows[[2]] != encoder.encode(["short"])).nnz == 0


def test_hashed_rows_of_no_texts_are_an_empty_matrix() -> None:
    assert open_encoder("hashed").encode([]).shape == (0, HashedEncoder.width)


@pytest.mark.parametrize(
    "spec",
    ["", "hash", "hashed:2", "hf:", "onnx:", "causal:model", "causal:model:x", "causal::2"],
)
def test_a_specification_that_names_no_encoder_is_refused(spec: str) -> None:
    with pytest.raises(DataError, match=r"E-HYDRA-ENCODER.*causal:MODEL:LAYER"):
        open_encoder(spec)


@pytest.mark.parametrize(("spec", "library"), [("onnx:x", "onnxruntime"), ("hf:x", "transformers")])
def test_a_missing_library_is_one_line_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, spec: str, library: str
) -> None:
    kind = spec.split(":")[0]
    module = {"onnx": "onnx", "hf": "huggingface"}[kind]
    monkeypatch.delitem(sys.modules, f"nmoe_data.hydra.encoder.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"E-HYDRA-EXTRA: {library} .*nmoe-data\[{kind}") as error:
        open_encoder(spec)
    assert "\n" not in str(error.value)


# ---- neural encoders, built from a configuration


@pytest.fixture(scope="module")
def fast_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models with random weights, as a user has them: folders."""
    return {
        "bert": write_bert(tmp_path_factory.mktemp("bert")),
        "llama": write_llama(tmp_path_factory.mktemp("llama")),
    }


@pytest.fixture(scope="module")
def specs(models: dict[str, Path]) -> dict[str, str]:
    return {"hf": f"hf:{models['bert']}", "causal": f"causal:{models['llama']}:2"}


@pytest.fixture(scope="module")
def reference(models: dict[str, Path], fast_tokenizer) -> Callable[[str, str], torch.Tensor]:
    """Return the states [L, W] of one document by transformers, without any batch."""
    bert = transformers.AutoModel.from_pretrained(models["bert"]).eval()
    llama = transformers.AutoModel.from_pretrained(models["llama"]).eval()

    @torch.inference_mode()
    def states(kind: str, text: str) -> torch.Tensor:
        ids = fast_tokenizer(text, truncation=True, return_tensors="pt")["input_ids"]
        if kind == "hf":
            return bert(input_ids=ids).last_hidden_state[0]
        hidden = llama(input_ids=ids, output_hidden_states=True).hidden_states
        return llama.norm(hidden[2])[0]

    return states


@pytest.mark.parametrize("kind", ["hf", "causal"])
def test_pooled_rows_are_the_mean_of_the_states_of_each_document_alone(
    specs: dict[str, str], reference: Callable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(batching, "WINDOW", 32)
    encoder = open_encoder(specs[kind])
    assert isinstance(encoder, TokenEncoder) and encoder.width == 32
    texts = corpus()
    rows = encoder.encode(texts)
    assert rows.dtype == np.float32
    expected = np.stack([reference(kind, text).mean(0).numpy() for text in texts])
    np.testing.assert_allclose(rows, expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["hf", "causal"])
def test_token_states_are_those_of_each_document_alone(
    specs: dict[str, str], reference: Callable, kind: str
) -> None:
    encoder = open_encoder(specs[kind])
    assert isinstance(encoder, TokenEncoder)
    texts = corpus()[:20]
    before = encoder.encode(texts)
    for text, states in zip(texts, encoder.token_states(texts, 1000), strict=True):
        np.testing.assert_allclose(states, reference(kind, text).numpy(), atol=2e-5)
    assert max(len(states) for states in encoder.token_states(texts, 7)) == 7
    # Fewer tokens for the states do not shorten what is pooled.
    assert (encoder.encode(texts) == before).all()


@pytest.mark.timeout(60)
def test_a_long_document_is_cut_to_the_tokens_of_the_model(specs: dict[str, str]) -> None:
    encoder = open_encoder(specs["hf"])
    assert isinstance(encoder, TokenEncoder)
    huge = "router " * 5_000_000
    rows = encoder.encode([huge, "router " * 60, "router"])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)
    assert [len(states) for states in encoder.token_states([huge], 1000)] == [LONGEST]


def test_special_tokens_in_a_document_are_text(specs: dict[str, str]) -> None:
    encoder = open_encoder(specs["hf"])
    assert isinstance(encoder, HfEncoder)
    (batch,) = encoder.batches(["[SEP] [PAD]"])
    assert list(batch.ids[0]).count(3) == 1 and 0 not in batch.ids[0]


def test_half_precision_is_near_and_has_the_same_hash(specs: dict[str, str]) -> None:
    full = open_encoder(specs["hf"])
    texts = corpus()
    rows = full.encode(texts)
    for dtype, tolerance in (("bfloat16", 2e-2), ("float16", 3e-3)):
        half = open_encoder(specs["hf"], dtype=dtype)
        assert (half.hash, half.dtype) == (full.hash, dtype)
        found = half.encode(texts)
        assert found.dtype == np.float32
        assert 0 < np.linalg.norm(found - rows) < tolerance * np.linalg.norm(rows)


def test_the_hash_follows_weights_tokenizer_and_layer_but_not_the_place(
    models: dict[str, Path], tmp_path: Path
) -> None:
    def copied(name: str) -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in models["llama"].iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    def hash_of(folder: Path, layer: int = 2) -> str:
        return open_encoder(f"causal:{folder}:{layer}").hash

    first = hash_of(models["llama"])
    assert hash_of(copied("same")) == first
    assert hash_of(models["llama"], 3) != first
    weights = copied("weights")
    data = bytearray((weights / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (weights / "model.safetensors").write_bytes(bytes(data))
    assert hash_of(weights) != first
    words = copied("words")
    file = words / "tokenizer.json"
    file.write_text(file.read_text().replace('"[UNK]"', '"[ODD]"'))
    assert hash_of(words) != first


def test_a_model_whose_weights_are_missing_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for file in models["bert"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(DataError, match=r"E-HYDRA-ENCODER.*lacks 16 weights"):
        open_encoder(f"hf:{tmp_path}")


def test_what_cannot_be_opened_is_one_line(models: dict[str, Path], tmp_path: Path) -> None:
    llama = models["llama"]
    cases: list[tuple[str, dict[str, str], str]] = [
        (f"causal:{llama}:5", {}, "it has 4 layers; give a layer from 1 to 4"),
        (f"causal:{llama}:0", {}, "from 1 to 4"),
        (f"hf:{tmp_path}", {}, "cannot be loaded"),
        (f"hf:{llama}", {"dtype": "int3"}, "no dtype int3; give one of float32"),
        (f"onnx:{tmp_path}", {}, "model.onnx is missing"),
    ]
    if not torch.cuda.is_available():
        cases.append((f"hf:{llama}", {"device": "cuda"}, "no device cuda"))
    for spec, options, words in cases:
        with pytest.raises(DataError, match="E-HYDRA-ENCODER") as error:
            open_encoder(spec, **options)
        assert words in str(error.value) and "\n" not in str(error.value)


# ---- ONNX


@pytest.fixture
def onnx_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a sentence encoder: an embedding, a product and tanh; pooled inside on demand."""
    onnx = pytest.importorskip("onnx", reason="making a graph needs the package onnx")
    helper, types = onnx.helper, onnx.TensorProto

    def write(pooled: bool = False, inputs: tuple[str, ...] = ("input_ids",)) -> Path:
        draw = np.random.default_rng(0)
        table = draw.normal(size=(VOCABULARY, 24)).astype(np.float32)
        weight = draw.normal(size=(24, 24)).astype(np.float32) / 5
        nodes = [
            helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
            helper.make_node("MatMul", ["embedded", "weight"], ["product"]),
            helper.make_node("Tanh", ["product"], ["states"]),
        ]
        if pooled:
            nodes.append(helper.make_node("ReduceMax", ["states"], ["rows"], axes=[1], keepdims=0))
        shape = ["b", 24] if pooled else ["b", "l", 24]
        output = helper.make_tensor_value_info("rows" if pooled else "states", types.FLOAT, shape)
        graph = helper.make_graph(
            nodes,
            "tiny",
            [
                helper.make_tensor_value_info(name, types.INT64, ["b", "l"])
                for name in (*inputs, "attention_mask")
            ],
            [output],
            [
                onnx.numpy_helper.from_array(table, "table"),
                onnx.numpy_helper.from_array(weight, "weight"),
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
        model.ir_version = 8
        folder = tmp_path / f"onnx-{pooled}-{len(inputs)}"
        folder.mkdir()
        onnx.save(model, folder / "model.onnx")
        tokenizer = make_tokenizer().backend_tokenizer
        tokenizer.enable_truncation(LONGEST)
        tokenizer.save(str(folder / "tokenizer.json"))
        np.savez(folder / "weights.npz", table=table, weight=weight)
        return folder

    return write


def test_onnx_rows_are_the_masked_mean_of_the_graph(
    onnx_folder: Callable[..., Path], fast_tokenizer
) -> None:
    folder = onnx_folder(inputs=("input_ids", "token_type_ids"))
    encoder = open_encoder(f"onnx:{folder}")
    assert isinstance(encoder, Encoder) and encoder.width == 24
    weights = np.load(folder / "weights.npz")
    texts = corpus()
    rows = encoder.encode(texts)
    for text, row in zip(texts, rows, strict=True):
        ids = fast_tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"]
        states = np.tanh(weights["table"][ids] @ weights["weight"])
        np.testing.assert_allclose(row, states.mean(axis=0), atol=1e-5)


def test_onnx_output_of_two_axes_is_taken_as_it_is(
    onnx_folder: Callable[..., Path], fast_tokenizer
) -> None:
    folder = onnx_folder(pooled=True)
    weights = np.load(folder / "weights.npz")
    (row,) = open_encoder(f"onnx:{folder}").encode(["the router"])
    ids = fast_tokenizer("the router")["input_ids"]
    expected = np.tanh(weights["table"][ids] @ weights["weight"]).max(axis=0)
    np.testing.assert_allclose(row, expected, atol=1e-5)


def test_onnx_graph_with_other_inputs_is_refused(onnx_folder: Callable[..., Path]) -> None:
    folder = onnx_folder(inputs=("input_ids", "pixel_values"))
    with pytest.raises(DataError, match=r"E-HYDRA-ENCODER.*pixel_values"):
        open_encoder(f"onnx:{folder}")
    (folder / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(DataError, match=r"E-HYDRA-ENCODER.*cannot be loaded"):
        open_encoder(f"onnx:{folder}")
