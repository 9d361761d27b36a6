"""Errors that a user of the kernels can mend."""


class KernelError(Exception):
    """A problem the user can mend: what was wrong, where, what to do about it; `code` is stable."""

    def __init__(self, code: str, what: str, remedy: str) -> None:
        super().__init__(f"{code}: {what}; {remedy}")
        self.code = code
