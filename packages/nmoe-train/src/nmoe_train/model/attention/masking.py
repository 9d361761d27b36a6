"""Who sees whom: a token sees itself and earlier tokens of its own document.

Letters: B sequences, S positions.
"""

import torch
from torch import Tensor


def document_mask(documents_BS: Tensor) -> Tensor:
    """Causal mask within documents, bool [B, 1, S, S]; True where query may see key.

    `documents` numbers the document of each token of a sequence, rising at every boundary.
    """
    length = documents_BS.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents_BS.device).tril()
    same = documents_BS[:, None, :, None] == documents_BS[:, None, None, :]
    return same & causal
