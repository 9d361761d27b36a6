"""Expert parallelism of a run: its group in nmoe_kernels, and what a step of it moved.

Letters: R ranks that hold all experts together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from nmoe_kernels.rdep import Counters, ExpertParallel, Settings

from nmoe_train.config import Config
from nmoe_train.parallel.groups import Groups


@contextmanager
def open_experts(
    config: Config, groups: Groups, device: torch.device, dtype: torch.dtype, tokens_max: int
) -> Iterator[ExpertParallel | None]:
    """The group over which tokens travel to their experts, or None where each rank holds all.

    `tokens_max`: the most tokens that a rank brings at once. Raises KernelError when the transport
    that the configuration names cannot run here.
    """
    if groups.expert is None:
        yield None
        return
    rdep, moe = config.parallel.rdep, config.model.moe
    with ExpertParallel(
        groups.expert,
        experts=moe.experts,
        width=config.model.width,
        slots=moe.top_k,
        tokens_max=tokens_max,
        dtype=dtype,
        device=device,
        settings=Settings(**rdep.model_dump()),
    ) as experts:
        yield experts


def exchange_record(step: Counters, groups: Groups) -> dict[str, float]:
    """What the exchange of a step's tokens took, for its metrics record.

    Rows, bytes and times are this rank's; assignments that reached no expert are those of all.
    """
    waits_ms = (step.wait_s_R * 1e3).tolist()
    (counted,) = groups.counts(int(step.dropped))
    # Neighbours that split experts have each other's tokens, and count the same ones.
    dropped = counted // groups.layout.etp
    hidden = step.hidden_ms / step.exchange_ms if step.exchange_ms else None
    return {
        **({} if hidden is None else {"overlap_ratio": hidden}),
        **{f"time_ms/{stage}": milliseconds for stage, milliseconds in step.stage_ms.items()},
        "router/dropped": dropped,
        "rdep/rows": int(step.rows_sent_R.sum()),
        "rdep/bytes": int(step.bytes_sent_R.sum()),
        "rdep/overflow": int(step.overflow),
        "rdep/wait_ms": sum(waits_ms),
        **{f"rdep/wait_ms/{peer}": wait for peer, wait in enumerate(waits_ms)},
    }
