"""A run from its configuration to its report: what `nmoe-train run` and `quickstart` do."""

from nmoe_data.loader import Loader

from nmoe_train.config import Config
from nmoe_train.console import ConsoleObserver
from nmoe_train.data import TrainingData, prepare
from nmoe_train.eval import generate
from nmoe_train.loop import Outcome, train
from nmoe_train.parallel import current_layout

PROMPT_TOKENS = 24
GENERATED_TOKENS = 48


def run_config(
    config: Config, observer: ConsoleObserver, *, allow_changes: bool = False
) -> Outcome:
    """Prepares the data, trains, and reports the held-out loss beside a unigram model's.

    Raises TrainError, nmoe_data's DataError or nmoe_kernels' KernelError.
    """
    layout = current_layout(config.parallel)
    with observer:
        data = prepare(config, observer.preparation)
        observer.message(
            f"{data.train.tokens:,} training tokens, {data.held_out.tokens:,} held out, "
            f"vocabulary {data.tokenizer.vocab_size:,}"
        )
        if data.note is not None:
            observer.message(data.note)
        outcome = train(config, data, layout, observer, allow_changes=allow_changes)
    if outcome.status != "completed":
        observer.message(f"saved at step {outcome.step}; the same command goes on from there")
        return outcome
    _continue_held_out_text(config, data, outcome, observer)
    model, unigram = outcome.results["loss/validation"], outcome.results["loss/unigram"]
    observer.message(f"validation loss {model:.2f} (unigram {unigram:.2f})")
    observer.message(f"dashboard: nviz serve {config.run.dir.parent}")
    return outcome


def _continue_held_out_text(
    config: Config, data: TrainingData, outcome: Outcome, observer: ConsoleObserver
) -> None:
    """Shows the first held-out tokens and what the model makes of them."""
    loader = Loader(data.held_out, seq_len=config.train.seq_len, seed=config.run.seed)
    ids = loader.sequential(0, 1).tokens[0, : min(PROMPT_TOKENS, config.train.seq_len)]
    prompt = data.tokenizer.decode(ids.tolist())
    continuation = generate(
        outcome.model, data.tokenizer, prompt, tokens=GENERATED_TOKENS, seed=config.run.seed
    )
    observer.message(f"\nheld-out text: {prompt}\ncontinued by the model: {continuation}\n")
