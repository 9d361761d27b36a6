"""What every encoder is: a frozen map from texts to rows of numbers, with a name and a hash.

Letters: N documents, W width of a row, L_n tokens of document n.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

FloatArray = npt.NDArray[np.float32]
FloatMatrix: TypeAlias = FloatArray | csr_array


@runtime_checkable
class Encoder(Protocol):
    """Texts to features.

    name: the specification that opens it again (`hashed`, `hf:PATH`). hash: SHA-256 (hex) of all
    that its output depends on: weights, tokenizer, pooling, truncation. width: W. device, dtype:
    where and in which floating-point type it computes ("cpu", "cuda:0"; "float32", "bfloat16"); not
    a part of the hash.
    """

    name: str
    hash: str
    width: int
    device: str
    dtype: str

    def encode(self, texts: Sequence[str]) -> FloatMatrix:
        """Returns float32 [N, W], in the order of `texts`; sparse if most of it is zero.

        A document's row does not depend on what else is in `texts`, beyond the rounding of sums.
        """


@runtime_checkable
class TokenEncoder(Encoder, Protocol):
    """An encoder that also has a state per token, for a judge head that reads them."""

    def token_states(self, texts: Sequence[str], max_tokens: int) -> list[FloatArray]:
        """Returns float32 [L_n, W] per text, L_n at most `max_tokens`, in the order of `texts`."""
