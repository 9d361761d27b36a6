"""The device that a process computes on."""

import os

import torch

from nmoe_train.errors import TrainError


def pick_device(
    name: str, *, deterministic: bool, local_rank: int = 0, local_ranks: int = 1
) -> torch.device:
    """The device that `run.device` names, told whether to repeat itself bitwise.

    Each of the `local_ranks` processes of this host takes a GPU of its own. Raises TrainError
    `E-DEVICE`, on all of them alike, if the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise TrainError("E-DEVICE", "no CUDA device is usable here", 'set run.device = "cpu"')
    if deterministic:
        # cuBLAS reads this when its handle is made, and repeats itself only with fixed workspaces.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # A module with properties, which its stubs do not show.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if local_ranks == 1:
        return torch.device(name)
    gpus = torch.cuda.device_count()
    if local_ranks > gpus:
        raise TrainError(
            "E-DEVICE",
            f"{local_ranks} processes were started on a host with {gpus} usable GPUs",
            'start one for each GPU, or set run.device = "cpu"',
        )
    torch.cuda.set_device(local_rank)
    return torch.device(name, local_rank)
