"""A run from its configuration to its report: what `nmoe-train run` and `quickstart` do."""

import torch
from nmoe_data.loader import Loader

from nmoe_train.config import Config
from nmoe_train.console import ConsoleObserver
from nmoe_train.data import TrainingData, open_prepared, prepare
from nmoe_train.elastic.session import RESIZED, Session
from nmoe_train.eval import generate
from nmoe_train.loop import DTYPES, Outcome, train
from nmoe_train.parallel.experts import open_experts
from nmoe_train.parallel.groups import Groups
from nmoe_train.plan import dry_run, lines, summary

PROMPT_TOKENS = 24
GENERATED_TOKENS = 48


def run_config(
    config: Config,
    groups: Groups,
    device: torch.device,
    observer: ConsoleObserver,
    *,
    allow_changes: bool = False,
    session: Session | None = None,
) -> Outcome:
    """Prepares the data, trains, and reports the held-out loss beside a unigram model's.

    Every rank calls it. `session`: this attempt's part in an elastic run, whose launcher has
    prepared the data. Raises TrainError, nmoe_data's DataError or nmoe_kernels' KernelError.
    """
    with observer:
        if session is None:
            data = _open_data(config, groups, observer)
        else:
            data = open_prepared(config, verify=False)
        observer.message(
            f"{data.train.tokens:,} training tokens, {data.held_out.tokens:,} held out, "
            f"vocabulary {data.tokenizer.vocab_size:,}"
        )
        if data.note is not None:
            observer.message(data.note)
        dtype, longest = DTYPES[config.precision.dtype], most_tokens(config, groups)
        with open_experts(config, groups, device, dtype, longest) as experts:
            if not groups.alone and session is None:
                # An elastic run must lose no time here, each time that its layout changes.
                _tell_layout(config, data, groups, observer)
            outcome = train(
                config,
                data,
                groups,
                observer,
                experts=experts,
                allow_changes=allow_changes,
                session=session,
            )
            if outcome.status == RESIZED:
                return outcome
            if outcome.status != "completed":
                observer.message(
                    f"saved at step {outcome.step}; the same command goes on from there"
                )
                return outcome
            _continue_held_out_text(config, data, outcome, groups, observer)
    model, unigram = outcome.results["loss/validation"], outcome.results["loss/unigram"]
    observer.message(f"validation loss {model:.2f} (unigram {unigram:.2f})")
    observer.message(f"dashboard: nviz serve {config.run.dir.parent}")
    return outcome


def _tell_layout(
    config: Config, data: TrainingData, groups: Groups, observer: ConsoleObserver
) -> None:
    """Says what the processes share, and what each is expected to hold and send."""
    if groups.first:
        vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
        report = dry_run(config, groups.layout, vocab_size)
        observer.message(summary(report))
        for line in lines(report):
            observer.message(line)


def _open_data(config: Config, groups: Groups, observer: ConsoleObserver) -> TrainingData:
    """Rank 0 makes and verifies the shards; the others open what it found good."""
    prepared: list[TrainingData] = []
    groups.first_does(lambda: prepared.append(prepare(config, observer.preparation)))
    return prepared[0] if prepared else open_prepared(config, verify=False)


def most_tokens(config: Config, groups: Groups) -> int:
    """The most tokens that a rank computes at once, in training or after it."""
    train, tp = config.train, groups.layout.tp
    sequences = train.micro_batch_size or train.batch_size // groups.layout.dp
    # A character that the end of the prompt cuts comes back longer: U+FFFD is three bytes.
    longest_text = min(3 * PROMPT_TOKENS + GENERATED_TOKENS, config.model.positions)
    # A rank of a tensor-parallel group has the tokens of its positions, and of those with which it
    # splits experts.
    return groups.layout.etp * max(sequences * -(-train.seq_len // tp), -(-longest_text // tp))


def _continue_held_out_text(
    config: Config, data: TrainingData, outcome: Outcome, groups: Groups, observer: ConsoleObserver
) -> None:
    """Shows the first held-out tokens and what the model makes of them."""
    loader = Loader(data.held_out, seq_len=config.train.seq_len, seed=config.run.seed)
    ids = loader.sequential(0, 1).tokens[0, : min(PROMPT_TOKENS, config.train.seq_len)]
    prompt = data.tokenizer.decode(ids.tolist())
    continuation = generate(
        outcome.model,
        data.tokenizer,
        prompt,
        tokens=GENERATED_TOKENS,
        seed=config.run.seed,
        groups=groups,
        pipeline=outcome.pipeline,
    )
    observer.message(f"\nheld-out text: {prompt}\ncontinued by the model: {continuation}\n")
