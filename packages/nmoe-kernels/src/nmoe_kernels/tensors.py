"""Where tensors lie in memory."""

from torch import Tensor

COPY_BYTES = 16
"""What the copy engine of a GPU reads at once, and what its reads start on."""


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and starting on 16 bytes; itself if it already is.

    A contiguous view may start anywhere. The copy engine cannot read such a one, and cuBLAS takes
    another kernel for it, which rounds otherwise.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % COPY_BYTES else tensor
