"""Small heads on a frozen encoder, as a folder: a linear probe and a judge, used without torch.

HEADS/ holds rubric.toml (that of the labels, byte for byte), probe.safetensors, judge.safetensors
if a judge head was trained, and head.json: the encoder they belong to, sizes, metrics, calibration.

The probe is one matrix product: the scale of the features is folded into its weight. A judge head
adds to the probe's scores what it has learned that the probe gets wrong. Over pooled features it is
`x @ weight + bias` with ReLU between the layers, after a projection (of sparse features) and a
standardisation that were fixed in training and lie in the same file; over token states it is a
small transformer (`networks`). head.json is written last and names the hashes of the other files,
so a folder of two trainings is noticed.

Letters: N documents, W width of the features, P of the projection, D dimensions of the rubric.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from nmoe_data.errors import DataError
from nmoe_data.files import atomic_write, only_writer, os_errors
from nmoe_data.hydra.calibrate import HIGHEST_SCORE, Calibration
from nmoe_data.hydra.encoder.contract import Encoder, FloatArray, FloatMatrix, TokenEncoder
from nmoe_data.hydra.extras import extra
from nmoe_data.hydra.rubric import Rubric, parse_rubric

RUBRIC_NAME = "rubric.toml"
PROBE_NAME = "probe.safetensors"
JUDGE_NAME = "judge.safetensors"
HEAD_NAME = "head.json"
SCHEMA_VERSION = 1
POOLED, TOKENS = "mlp", "transformer"

Tensors = dict[str, FloatArray]


@dataclass(frozen=True, slots=True)
class Probe:
    """scores = (features - mean [W]) @ weight [W, D] + bias [D]; no mean for sparse features.

    With the mean in the bias, large features of little spread would cancel in float32.
    """

    weight: FloatArray
    bias: FloatArray
    mean: FloatArray | None = None

    def raw_scores(self, features: FloatMatrix) -> FloatArray:
        """Returns float32 [N, D], which may lie outside 0..5."""
        centred = features if self.mean is None else features - self.mean
        return np.asarray(centred @ self.weight) + self.bias

    def tensors(self) -> Tensors:
        """Returns what probe.safetensors holds."""
        named = {"weight": self.weight, "bias": self.bias}
        return named if self.mean is None else {**named, "mean": self.mean}


class JudgeHead(Protocol):
    """A judge head of either kind."""

    @property
    def kind(self) -> str:
        """Returns "mlp" or "transformer", as it stands in head.json."""

    def tensors(self) -> Tensors:
        """Returns what judge.safetensors holds."""

    def settings(self) -> dict[str, Any]:
        """Returns the sizes that head.json names."""


@dataclass(frozen=True, slots=True)
class PooledJudge:
    """A multi-layer perceptron over pooled features.

    projection: [W, P], None where the features are dense (P = W). mean, scale: [P]. layers:
    (weight [in, out], bias [out]) from the first to the last, which has D outputs.
    """

    projection: FloatArray | None
    mean: FloatArray
    scale: FloatArray
    layers: tuple[tuple[FloatArray, FloatArray], ...] = ()
    kind: str = POOLED

    def inputs(self, features: FloatMatrix) -> FloatArray:
        """Returns the standardised float32 [N, P] that the first layer sees, also in training."""
        projected = features if self.projection is None else features @ self.projection
        return np.asarray((np.asarray(projected) - self.mean) / self.scale, np.float32)

    def corrections(self, features: FloatMatrix) -> FloatArray:
        """Returns float32 [N, D], to be added to the probe's scores."""
        x = self.inputs(features)
        for weight, bias in self.layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        weight, bias = self.layers[-1]
        return x @ weight + bias

    def tensors(self) -> Tensors:
        """Returns what judge.safetensors holds."""
        named = {"mean": self.mean, "scale": self.scale}
        if self.projection is not None:
            named["projection"] = self.projection
        for number, (weight, bias) in enumerate(self.layers):
            named |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        return named

    def settings(self) -> dict[str, Any]:
        """Returns the sizes that head.json names."""
        widths = [len(self.mean), *(len(bias) for _, bias in self.layers)]
        return {"widths": widths, "projected": self.projection is not None}


def in_range(scores: FloatArray) -> FloatArray:
    """Returns float32 scores cut to 0..5."""
    return np.clip(scores, 0.0, HIGHEST_SCORE).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a HEADS folder holds.

    rubric: of the labels. encoder_spec, encoder_hash, encoder_width: the only encoder they work
    with. probe, judge: the heads. info: the rest of head.json (seed, counts, metrics). calibration:
    None before `hydra calibrate`. hash: SHA-256 (hex) of head.json, which names those of the other
    files; "" if they come from no folder.
    """

    rubric: Rubric
    encoder_spec: str
    encoder_hash: str
    encoder_width: int
    probe: Probe
    judge: JudgeHead | None = None
    calibration: Calibration | None = None
    info: dict[str, Any] = field(default_factory=dict)
    hash: str = ""

    @property
    def has_judge(self) -> bool:
        """Whether there is a judge head."""
        return self.judge is not None

    def check_encoder(self, encoder: Encoder) -> None:
        """Raises DataError E-HYDRA-ENCODER unless `encoder` is the one that they were trained on.

        The floating-point type and the device may differ.
        """
        if encoder.hash != self.encoder_hash:
            raise DataError(
                "E-HYDRA-ENCODER",
                f"these heads were trained on {self.encoder_spec} with hash "
                f"{self.encoder_hash[:16]}, and {encoder.name} has {encoder.hash[:16]}",
                "use the encoder they were trained on, or train heads for this one",
            )

    def probe_scores(self, features: FloatMatrix) -> FloatArray:
        """Returns the probe's scores, float32 [N, D] in 0..5, of features [N, W]."""
        return in_range(self.probe.raw_scores(self._checked(features)))

    def judge_scores(self, features: FloatMatrix) -> FloatArray:
        """Returns the judge head's scores, float32 [N, D] in 0..5, of pooled features [N, W].

        Raises DataError: E-HYDRA-NO-JUDGE if there is none, or if it reads token states: then call
        `judge_texts`.
        """
        if not isinstance(self.judge, PooledJudge):
            what = "read token states" if self.judge else "have no judge head"
            raise DataError(
                "E-HYDRA-NO-JUDGE", f"these heads {what}", "train with --heads probe,judge"
            )
        checked = self._checked(features)
        return in_range(self.probe.raw_scores(checked) + self.judge.corrections(checked))

    def judge_texts(
        self, encoder: Encoder, texts: Sequence[str], features: FloatMatrix
    ) -> FloatArray:
        """Returns the judge head's scores [N, D] whichever kind it is.

        features: the pooled rows of `texts`, as `encoder` gave them; a head over token states asks
        the encoder once more.
        Raises DataError: E-HYDRA-NO-JUDGE, E-HYDRA-ENCODER, E-HYDRA-EXTRA (torch is missing).
        """
        if self.judge is None or self.judge.kind == POOLED:
            return self.judge_scores(features)
        with extra("torch"):
            from nmoe_data.hydra.networks import TokenJudge

        assert isinstance(self.judge, TokenJudge) and isinstance(encoder, TokenEncoder)
        states = encoder.token_states(texts, self.judge.max_tokens)
        return in_range(self.probe.raw_scores(features) + self.judge.corrections(states))

    def _checked(self, features: FloatMatrix) -> FloatMatrix:
        if features.shape[1] != self.encoder_width:
            raise DataError(
                "E-HYDRA-ENCODER",
                f"features have {features.shape[1]} columns, these heads take {self.encoder_width}",
                f"encode with {self.encoder_spec}",
            )
        return features


def save_heads(folder: Path, heads: Heads) -> Heads:
    """Writes a HEADS folder and returns the heads with their hash.

    Raises DataError: E-OUT-BUSY, or those of `os_errors`.
    """
    with extra("hydra"):
        from safetensors.numpy import save

    files = {RUBRIC_NAME: heads.rubric.toml, PROBE_NAME: save(heads.probe.tensors())}
    if heads.judge is not None:
        files[JUDGE_NAME] = save(heads.judge.tensors())
    content = {
        "schema_version": SCHEMA_VERSION,
        "encoder": {
            "spec": heads.encoder_spec,
            "hash": heads.encoder_hash,
            "width": heads.encoder_width,
        },
        "rubric": {
            "name": heads.rubric.name,
            "hash": heads.rubric.hash,
            "dimensions": heads.rubric.names,
        },
        "judge": heads.judge and {"kind": heads.judge.kind, **heads.judge.settings()},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        **heads.info,
        "calibration": heads.calibration and heads.calibration.to_json(),
    }
    head = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    with os_errors("write the heads in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with only_writer(folder):
            for name, data in files.items():
                atomic_write(folder / name, data)
            if heads.judge is None:
                (folder / JUDGE_NAME).unlink(missing_ok=True)
            atomic_write(folder / HEAD_NAME, head)
    return replace(heads, hash=hashlib.sha256(head).hexdigest())


def open_heads(folder: str | Path) -> Heads:
    """Opens a HEADS folder after checking that its files are whole and belong together.

    Raises DataError: E-HYDRA-HEADS if not, those of `os_errors`.
    """
    folder = Path(folder)
    if not (folder / HEAD_NAME).is_file():
        raise _problem(folder, f"has no {HEAD_NAME}")
    with os_errors("read", folder):
        head = (folder / HEAD_NAME).read_bytes()
    try:
        content = orjson.loads(head)
        if content["schema_version"] != SCHEMA_VERSION:
            raise _problem(folder, f"has version {content['schema_version']}")
        files = {name: _read_file(folder, name, hash) for name, hash in content["files"].items()}
        return _parse(folder, content, files, hashlib.sha256(head).hexdigest())
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise _problem(folder, f"has a {HEAD_NAME} that cannot be understood ({error!r})") from None


def _read_file(folder: Path, name: str, hash: str) -> bytes:
    if name not in (RUBRIC_NAME, PROBE_NAME, JUDGE_NAME):
        raise _problem(folder, f"names an unknown file {name}")
    with os_errors("read", folder / name):
        data = (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != hash:
        raise _problem(folder, f"has a {name} that is not what was written with {HEAD_NAME}")
    return data


def _parse(folder: Path, content: dict[str, Any], files: dict[str, bytes], hash: str) -> Heads:
    with extra("hydra"):
        from safetensors.numpy import load

    calibration, judge = content["calibration"], content["judge"]
    own = ("schema_version", "encoder", "rubric", "judge", "files", "calibration")
    return Heads(
        rubric=parse_rubric(files[RUBRIC_NAME], str(folder / RUBRIC_NAME)),
        encoder_spec=content["encoder"]["spec"],
        encoder_hash=content["encoder"]["hash"],
        encoder_width=content["encoder"]["width"],
        probe=Probe(**load(files[PROBE_NAME])),
        judge=judge and _judge(judge, load(files[JUDGE_NAME])),
        calibration=calibration and Calibration.from_json(calibration),
        info={name: value for name, value in content.items() if name not in own},
        hash=hash,
    )


def _judge(settings: dict[str, Any], tensors: Tensors) -> JudgeHead:
    if settings["kind"] == POOLED:
        count = len(settings["widths"]) - 1
        names = [(f"layers.{number}.weight", f"layers.{number}.bias") for number in range(count)]
        layers = tuple((tensors[weight], tensors[bias]) for weight, bias in names)
        return PooledJudge(tensors.get("projection"), tensors["mean"], tensors["scale"], layers)
    with extra("torch"):
        from nmoe_data.hydra.networks import TokenJudge

    return TokenJudge.from_tensors(settings, tensors)


def _problem(folder: Path, what: str) -> DataError:
    return DataError("E-HYDRA-HEADS", f"{folder} {what}", "run `nmoe-data hydra train` again")
