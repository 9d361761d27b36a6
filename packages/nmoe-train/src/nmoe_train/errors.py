"""Errors that the user can mend, each with a stable code."""

USER_ERROR = 2
"""Exit code of a command that such an error has ended."""


class TrainError(Exception):
    """A problem the user can mend: what was wrong, where, and what to do about it.

    `code` is stable (`E-CONFIG`, `E-CHECKPOINT-CORRUPT`, ...) and is what scripts should look at.
    """

    def __init__(self, code: str, what: str, remedy: str) -> None:
        super().__init__(f"{code}: {what}; {remedy}")
        self.code, self.what = code, what
