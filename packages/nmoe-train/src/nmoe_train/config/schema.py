"""The configuration of a run: one TOML file, checked before anything else happens.

Every key is a field of one of the models below, with its meaning and default; `nmoe-train validate
--schema` prints them all. Sections nest as in the file: `[train] steps = 100` is `train.steps`.
What a single field cannot say about itself (top_k against experts, sequence against positions) is
checked where both are in sight, and every problem names the field's path and the remedy.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class FieldProblem(ValueError):
    """A value that does not fit with others: the field (relative to its section) and the remedy."""

    def __init__(self, field: str, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.field = field


def _at_home(path: object) -> object:
    """A path as a shell would read it: `~` is the user's home."""
    return str(Path(path).expanduser()) if isinstance(path, str) and path[:1] == "~" else path


HomePath = Annotated[Path, Field(strict=False), BeforeValidator(_at_home)]
HomeText = Annotated[str, BeforeValidator(_at_home)]


class Section(BaseModel):
    """Common to all sections: no unknown keys, no change after loading, no silent coercion."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    """Where the run lives and what it is called."""

    dir: HomePath = Path("runs/run")
    """Run folder: metrics, events, checkpoints. The same folder again resumes the run."""
    name: str | None = None
    """Name shown in the dashboard; the folder's name when absent."""
    tags: list[str] = []
    """Words to find the run by."""
    group: str | None = None
    """Name shared by runs that belong together, such as the seeds of one experiment."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of every random number: initial weights, order of the data, sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA if there is a GPU."""
    deterministic: bool = True
    """Whether CUDA must repeat itself bitwise; off, it may take faster kernels that do not."""


class AttentionConfig(Section):
    """Multi-head latent attention (MLA), or grouped-query attention (GQA)."""

    kind: Literal["mla", "gqa"] = "mla"
    """mla compresses keys and values into a latent; gqa shares them between heads."""
    q_lora_rank: Annotated[int, Field(ge=0)] = 0
    """mla: width of the query latent; 0 projects queries directly."""
    kv_lora_rank: PositiveInt = 512
    """mla: width of the key-value latent."""
    qk_nope_head_dim: PositiveInt = 128
    """mla: part of a query-key head without position."""
    qk_rope_head_dim: PositiveInt = 64
    """mla: part of a query-key head with rotary position; even."""
    v_head_dim: PositiveInt = 128
    """mla: width of a value head."""
    kv_heads: PositiveInt | None = None
    """gqa: key-value heads; the number of query heads when absent."""
    head_dim: PositiveInt | None = None
    """gqa: width of a head, even; model.width / model.heads when absent."""

    @model_validator(mode="after")
    def _rotary_part_is_even(self) -> "AttentionConfig":
        if self.qk_rope_head_dim % 2:
            raise FieldProblem(
                "qk_rope_head_dim",
                f"rotary dimensions turn in pairs, and {self.qk_rope_head_dim} is odd",
                "take an even number",
            )
        return self


class MoEConfig(Section):
    """Mixture-of-Experts layers: the router and its experts."""

    experts: PositiveInt
    """Routed experts of a layer."""
    top_k: PositiveInt
    """Experts chosen for each token."""
    expert_width: PositiveInt
    """Hidden width of one expert."""
    shared_experts: Annotated[int, Field(ge=0)] = 1
    """Experts that every token visits, as one MLP of shared_experts * expert_width; 0 for none."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """How router logits become scores."""
    groups: PositiveInt = 1
    """Groups that the experts form for group-limited choice."""
    top_groups: PositiveInt = 1
    """Groups that a token may choose from."""
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    scale: PositiveFloat = 1.0
    """Factor on the routed experts' weights."""
    bias_update_rate: NonNegativeFloat = 1e-3
    """Step of the auxiliary-free balancing bias per optimizer step; 0 turns it off."""
    balance_loss: NonNegativeFloat = 1e-4
    """Coefficient of the sequence-wise balancing loss."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of the router's z-loss."""

    @model_validator(mode="after")
    def _choice_is_possible(self) -> "MoEConfig":
        if self.experts % self.groups:
            raise FieldProblem(
                "groups",
                f"{self.experts} experts do not divide into {self.groups} groups",
                "take a divisor of the number of experts",
            )
        if self.top_groups > self.groups:
            raise FieldProblem(
                "top_groups",
                f"{self.top_groups} groups chosen out of {self.groups}",
                f"take at most {self.groups}",
            )
        available = self.experts // self.groups * self.top_groups
        if self.top_k > available:
            raise FieldProblem(
                "top_k",
                f"{self.top_k} experts chosen per token out of {available} available",
                f"take at most {available}",
            )
        return self


class ModelConfig(Section):
    """Shape of the decoder-only transformer."""

    width: PositiveInt
    """Width of the residual stream."""
    layers: PositiveInt
    """Transformer layers in all."""
    dense_layers: Annotated[int, Field(ge=0)] = 1
    """Leading layers with a dense MLP in place of experts."""
    heads: PositiveInt
    """Attention heads."""
    dense_width: PositiveInt
    """Hidden width of the dense layers' MLP."""
    positions: PositiveInt = 4096
    """Longest sequence the model accepts."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; the tokenizer's vocabulary when absent."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    attention: AttentionConfig = AttentionConfig()
    """Attention of every layer."""
    moe: MoEConfig
    """Mixture-of-Experts of the layers after the dense ones."""

    @model_validator(mode="after")
    def _parts_fit(self) -> "ModelConfig":
        if self.dense_layers > self.layers:
            raise FieldProblem(
                "dense_layers",
                f"{self.dense_layers} dense layers in a model of {self.layers} layers",
                f"take at most {self.layers}",
            )
        if self.width % self.heads:
            raise FieldProblem(
                "width",
                f"width {self.width} does not divide into {self.heads} heads",
                "change model.width or model.heads",
            )
        if self.attention.kind == "gqa":
            self._check_gqa(self.attention)
        return self

    @property
    def head_dim(self) -> int:
        """gqa: width of a head."""
        return self.attention.head_dim or self.width // self.heads

    def _check_gqa(self, attention: AttentionConfig) -> None:
        if self.head_dim % 2:
            raise FieldProblem(
                "attention.head_dim",
                f"rotary dimensions turn in pairs, and a head has {self.head_dim}",
                "make it even",
            )
        if attention.kv_heads is not None and self.heads % attention.kv_heads:
            raise FieldProblem(
                "attention.kv_heads",
                f"{self.heads} heads cannot share {attention.kv_heads} key-value heads evenly",
                "take a divisor of model.heads",
            )


class DataConfig(Section):
    """Token shards, and the text to make them from if they are not there yet."""

    dir: HomePath | None = None
    """Folder with train/ and held-out/ shards (nmoe-data prep); `<run.dir>/data` when absent."""
    text: HomeText | None = None
    """Text to make the shards from: a folder, a file, or "python-stdlib" for the standard library
    of the running Python. Absent: the shards must exist."""
    tokenizer: HomeText = "bpe:4096"
    """For making shards: "bpe:N" trains a BPE of N ids, "bytes", or a tokenizer.json."""
    held_out: Fraction = 0.05
    """For making shards: share of the documents kept for validation."""
    limit_mb: PositiveFloat | None = None
    """For making shards: megabytes of text to take at most."""
    verify: bool = True
    """Whether the shards' checksums are checked at every start; about a second per gigabyte."""


class TrainConfig(Section):
    """Length and size of the optimization."""

    steps: PositiveInt
    """Optimizer steps in all."""
    seq_len: PositiveInt
    """Tokens of a sequence."""
    batch_size: PositiveInt
    """Sequences of one step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Sequences that a rank computes at once, accumulating; its whole share when absent."""
    clip_norm: NonNegativeFloat = 1.0
    """Limit of the global gradient norm; 0 turns clipping off."""
    loss_chunk: PositiveInt = 1024
    """Tokens whose logits exist at one time in the cross-entropy."""
    recompute: Literal["none", "layer"] = "none"
    """What is computed again in the backward pass to save memory."""


class OptimizerConfig(Section):
    """AdamW, or Muon for hidden matrices, with separate rates for dense weights, routers, experts.

    Updates of both have the same size, so that one rate serves both.
    """

    name: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises the momentum of every hidden matrix, expert by expert and head by head;
    embedding, output projection, norms and routers keep AdamW."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate of the dense weights."""
    lr_router: PositiveFloat | None = None
    """Peak rate of the routers; lr when absent."""
    lr_expert: PositiveFloat | None = None
    """Peak rate of the routed experts; lr when absent."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """adamw: decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""
    momentum: Fraction = 0.95
    """muon: decay of the momentum, which is Nesterov's."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; norms, biases, routers and embeddings have none."""


class ScheduleConfig(Section):
    """Warm-up, stable, decay (WSD), or cosine, counted in tokens."""

    kind: Literal["wsd", "cosine"] = "wsd"
    """wsd holds the peak and decays linearly at the end; cosine decays all along."""
    warmup: NonNegativeFloat = 0.02
    """Linear warm-up, in tokens; below 1, as a share of the run's tokens."""
    decay: NonNegativeFloat = 0.2
    """wsd: final decay, in tokens; below 1, as a share of the run's tokens."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end, as a share of the peak."""


class PrecisionConfig(Section):
    """Number formats."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of activations and of weights inside matrix products; master weights, moments,
    gradients, router and loss stay fp32."""


class RdepConfig(Section):
    """How tokens travel to the owners of their experts."""

    transport: Literal["local", "collective", "p2p", "nvshmem"] | None = None
    """What carries the rows; picked by the hardware, and said, when absent."""
    capacity: Literal["exact"] | PositiveFloat = "exact"
    """exact takes what is routed; a factor bounds what an expert takes from one rank to that times
    the even share."""
    overflow: Literal["error", "drop", "reroute"] = "error"
    """What happens beyond the bound."""
    deadline_s: Annotated[float, Field(ge=1)] = 600.0
    """Seconds that a rank waits for another before it gives up and names it."""
    keep: Literal["keep", "fetch"] = "keep"
    """Whether the backward pass keeps the rows that came, or fetches them again."""


class PipelineConfig(Section):
    """How a pipeline's stages share the layers and take turns; parallel.pp is their number."""

    schedule: Literal["1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """1f1b holds least; interleaved waits less and sends more; zero-bubble waits least and holds
    more, as gradients of weights wait for idle time."""
    chunks: PositiveInt = 1
    """interleaved: runs of layers that each stage holds, at least 2; else 1."""
    split: list[PositiveInt] | None = None
    """Layers of each run, in order: parallel.pp * chunks numbers; by cost when absent."""


class ParallelConfig(Section):
    """How the work is split over processes; dp x tp x pp is their number."""

    dp: PositiveInt | None = None
    """Data-parallel replicas; the number of processes when absent."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline stages."""
    ep: PositiveInt = 1
    """Expert-parallel ranks; folds over dp x tp / etp."""
    etp: PositiveInt = 1
    """Tensor-parallel ranks that split the width of each expert; a divisor of tp."""
    fsdp: bool = False
    """Whether weights, gradients and moments are cut over the ranks that would hold them alike, and
    gathered layer by layer (FSDP2): less memory for more messages."""
    pipeline: PipelineConfig = PipelineConfig()
    """Schedule of the pipeline."""
    rdep: RdepConfig = RdepConfig()
    """Transport of expert parallelism."""


class CheckpointConfig(Section):
    """When the state is saved and how much is kept."""

    every: PositiveInt = 100
    """Steps between checkpoints; the last step is saved in any case."""
    keep: PositiveInt = 2
    """Complete checkpoints kept. With a mirror older ones stay until a newer one is there too."""
    mirror: str | None = None
    """URL (s3://bucket/prefix, file:///mnt/share, or any other that fsspec knows) below which a
    process beside rank 0 copies every checkpoint, as <run.dir's name>/checkpoints/step-N. A start
    without a sound checkpoint in run.dir takes the newest from there."""
    mirror_keep: PositiveInt | None = None
    """Complete checkpoints kept in the mirror; all where this is left out."""
    mirror_patience_s: PositiveFloat = 60.0
    """Seconds that an upload is tried again before it is an alert. Training goes on, and so do
    later tries. A third of it is how long one request to S3 may take."""
    limit_mb_s: PositiveFloat | None = None
    """Megabytes (10^6 bytes) a second that a rank writes to disk at most when it saves, and that
    the mirror is sent; no limit where this is left out."""


class ElasticConfig(Section):
    """Going on when workers are lost or come back, under `nmoe-train elastic`."""

    snapshot_every: Annotated[int, Field(ge=0)] = 10
    """Steps between copies of the state in the memory of this rank and the next. A death costs the
    steps since a copy that all have finished: one more than these at most, if the copy survives.
    0 keeps none: a death costs the steps since the newest checkpoint."""
    beat_s: PositiveFloat = 0.5
    """Seconds between a worker's signs of life."""
    deadline_s: PositiveFloat = 15.0
    """Seconds of silence after which a worker is counted out. One whose process ends, or whose
    connections break, is noticed at once."""
    join_s: PositiveFloat = 120.0
    """Seconds to wait for all workers at the start; after that it starts with those that came."""
    min_ranks: PositiveInt = 1
    """Fewest ranks to train with; with fewer the run waits for workers."""
    min_ep: PositiveInt = 1
    """Fewest ranks over which experts may be spread, where memory cannot hold more on each."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row a worker is started again that ended before it finished a new step."""
    fruitless: PositiveInt = 10
    """Generations of workers in a row that a fault may end before they finish a new step; then the
    run ends."""


class EvalConfig(Section):
    """Validation on the held-out shards."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates at the end only."""
    sequences: PositiveInt = 64
    """Held-out sequences of a validation, at most."""


class TelemetryConfig(Section):
    """Metrics of the run folder."""

    straggler_factor: Annotated[float, Field(gt=1)] = 2.0
    """A rank whose own part of a step takes this many times the median of all is slow."""
    straggler_steps: PositiveInt = 5
    """Steps in a row after which a slow rank is named in an alert."""
    gradient_checksum_every: Annotated[int, Field(ge=0)] = 0
    """Steps between comparisons of the summed gradients over ranks that must have the same; an
    alert names the rank that differs. 0 never compares."""
    seal_every: PositiveInt = 1000
    """Steps that the live file holds before they are sealed into a Parquet part."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device for the MFU; known for common GPUs, absent on CPU."""


class Config(Section):
    """Everything a run needs to know."""

    run: RunConfig = RunConfig()
    """Where the run lives."""
    model: ModelConfig
    """Shape of the model."""
    data: DataConfig = DataConfig()
    """What it learns from."""
    train: TrainConfig
    """How long and how much."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate over tokens."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    parallel: ParallelConfig = ParallelConfig()
    """Split over processes."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    elastic: ElasticConfig = ElasticConfig()
    """Going on without lost workers."""
    eval: EvalConfig = EvalConfig()
    """Validation."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Metrics."""

    @model_validator(mode="after")
    def _sections_fit(self) -> "Config":
        train, schedule = self.train, self.schedule
        if train.seq_len > self.model.positions:
            raise FieldProblem(
                "train.seq_len",
                f"{train.seq_len} tokens in a model of {self.model.positions} positions",
                "lower train.seq_len or raise model.positions",
            )
        ramps = sum(self.schedule_tokens(length) for length in (schedule.warmup, schedule.decay))
        if schedule.kind == "wsd" and ramps > self.total_tokens:
            raise FieldProblem(
                "schedule.decay",
                f"warm-up and decay take {ramps} tokens of a run of {self.total_tokens}",
                "lower schedule.warmup or schedule.decay, or raise train.steps",
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimizer step over all ranks."""
        return self.train.batch_size * self.train.seq_len

    @property
    def total_tokens(self) -> int:
        """Input tokens of the whole run."""
        return self.train.steps * self.tokens_per_step

    def schedule_tokens(self, length: float) -> int:
        """A length of the schedule in tokens; below 1 it is a share of the run."""
        return round(length * self.total_tokens) if length < 1 else round(length)

    @property
    def data_dir(self) -> Path:
        """Folder of the token shards."""
        return self.data.dir if self.data.dir is not None else self.run.dir / "data"
