"""Libraries that come with an extra of the package, and the one line where they are missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from nmoe_data.errors import DataError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turns the failed import of a library in the block into an error that names the extra.

    Raises DataError: E-HYDRA-EXTRA.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(
            "E-HYDRA-EXTRA",
            f"{error.name} is not installed",
            f'pip install "nmoe-data[{name}]"',
        ) from error
