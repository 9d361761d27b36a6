"""The charts of a run and of its router: which metrics belong together, and what to look for."""

from nviz.charts import Panel

LOSS = Panel(
    "Loss",
    "Nats per token. It should fall and flatten, with validation close to training; "
    "crosses mark NaN or infinity.",
    {"training": "loss/train", "validation": "loss/validation"},
    unit="nats per token",
    points=frozenset({"validation"}),
    log=True,
    height=330,
)
RUN_PANELS = (
    Panel(
        "Tokens per second",
        "Training speed. Look for drops: slow data, a checkpoint, a slow rank.",
        {"tokens per second": "tokens_per_s"},
        unit="tokens/s",
    ),
    Panel(
        "Gradient norm",
        "Before clipping. Spikes announce a loss spike; a steady rise is a warning.",
        {"gradient norm": "grad_norm"},
        log=True,
    ),
    Panel(
        "Learning rates",
        "Warm-up, plateau and decay as planned, for each group of weights.",
        {"dense": "lr/dense", "router": "lr/router", "expert": "lr/expert"},
    ),
    Panel(
        "Step time",
        "Where a step's milliseconds go. The parts should be level; data should be near 0.",
        {
            "whole step": "step_ms",
            "data": "time_ms/data",
            "forward": "time_ms/forward",
            "backward": "time_ms/backward",
            "optimizer": "time_ms/optimizer",
        },
        unit="ms",
    ),
    Panel(
        "Loss terms",
        "Means, before their coefficients. Balance rises with uneven load, z-loss with growing "
        "router logits.",
        {
            "cross-entropy": "loss/ce",
            "balance, unscaled": "loss/balance",
            "z-loss, unscaled": "loss/z",
        },
        log=True,
    ),
    Panel(
        "Memory",
        "Peak close to the device's size risks running out.",
        {
            "peak": "memory/peak_gib",
            "reserved": "memory/reserved_gib",
            "allocated": "memory/allocated_gib",
        },
        unit="GiB",
    ),
)
ROUTER_PANELS = (
    Panel(
        "Load imbalance",
        "Busiest expert over the mean. 1 is even; above 2, the slowest rank waits for one expert.",
        {"imbalance": "router/load_imbalance"},
        unit="max / mean",
    ),
    Panel(
        "Router entropy",
        "How undecided the router is. A fall to 0 means that few experts get everything.",
        {"entropy": "router/entropy"},
        unit="nats",
    ),
    Panel(
        "Bias range",
        "Spread of the balancing bias. A steady rise means that it fights the router.",
        {"bias range": "router/bias_range"},
    ),
    Panel(
        "Dropped tokens",
        "Rows beyond an expert's capacity. It should be 0 unless a capacity is set.",
        {"dropped": "router/dropped"},
    ),
    Panel(
        "Dead experts",
        "Experts without a token in a step, all layers together. Above 0 for long, one is wasted.",
        {"dead experts": "router/dead_experts"},
    ),
)
