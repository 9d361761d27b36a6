"""Ridge regression for a whole path of regularisations at the price of about one.

With centred features X [N, W] and targets Y [N, D], the weight is (X'X + a I)^-1 X'Y, or
X'(XX' + a I)^-1 Y, whichever matrix is smaller (Hoerl and Kennard 1970; Saunders et al. 1998). Its
eigenvectors are found once, and each a is then a division. Sparse features stay sparse: XX' is
centred after the product. Where both matrices would be too large, the features are sparse and many,
and scikit-learn's conjugate gradients solve each a by itself.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh
from scipy.sparse import csr_array, issparse
from sklearn.linear_model import Ridge

from nmoe_data.hydra.encoder.contract import FloatArray, FloatMatrix

Float64Array = npt.NDArray[np.float64]

LARGEST_MATRIX = 4096
TOLERANCE = 1e-4


def ridge_path(
    features: FloatMatrix, targets: FloatArray, alphas: Sequence[float]
) -> Iterator[tuple[float, FloatArray, FloatArray]]:
    """Yields (alpha, weight float32 [W, D], bias float32 [D]) for each regularisation.

    features: [N, W], as they are; the bias is not regularised. targets: [N, D].
    """
    mean = np.asarray(features.mean(axis=0), np.float64).reshape(-1)
    target_mean = targets.mean(axis=0, dtype=np.float64)
    centred = targets - target_mean
    count, width = features.shape
    if issparse(features) and min(count, width) > LARGEST_MATRIX:
        solutions = _by_iteration(features, targets, alphas)
    elif width <= count and not issparse(features):
        solutions = _by_features(features - mean, centred, alphas)
    else:
        solutions = _by_documents(features, mean, centred, alphas)
    for alpha, weight in zip(alphas, solutions, strict=True):
        bias = target_mean - mean @ weight
        yield alpha, weight.astype(np.float32), bias.astype(np.float32)


def _by_features(
    centred: Float64Array, targets: Float64Array, alphas: Sequence[float]
) -> Iterator[Float64Array]:
    eigenvalues, vectors = eigh(centred.T @ centred)
    turned = vectors.T @ (centred.T @ targets)
    for alpha in alphas:
        yield vectors @ (turned / (np.maximum(eigenvalues, 0.0) + alpha)[:, None])


def _by_documents(
    features: FloatMatrix, mean: Float64Array, targets: Float64Array, alphas: Sequence[float]
) -> Iterator[Float64Array]:
    eigenvalues, vectors = eigh(centred_gram(features))
    turned = vectors.T @ targets
    for alpha in alphas:
        duals = vectors @ (turned / (np.maximum(eigenvalues, 0.0) + alpha)[:, None])
        # The duals sum to zero, as the targets do, so centring would change nothing here.
        yield np.asarray(features.T @ duals)


def centred_gram(features: FloatMatrix) -> Float64Array:
    """Returns the products [N, N] of the rows of `features`, as if its columns had mean zero."""
    product = features @ features.T
    gram = np.asarray(product.toarray() if isinstance(product, csr_array) else product, np.float64)
    rows = gram.mean(axis=0)
    return gram - rows[:, None] - rows[None, :] + rows.mean()


def _by_iteration(
    features: FloatMatrix, targets: FloatArray, alphas: Sequence[float]
) -> Iterator[Float64Array]:
    for alpha in alphas:
        ridge = Ridge(alpha=alpha, solver="sparse_cg", tol=TOLERANCE).fit(features, targets)
        yield ridge.coef_.reshape(targets.shape[1], -1).T
