"""The one exception that users of this package are meant to see."""


class DataError(Exception):
    """A problem the user can mend: what was wrong, where, and what to do about it.

    `code` is stable across versions, so scripts may compare it.
    """

    def __init__(self, code: str, what: str, remedy: str) -> None:
        super().__init__(f"{code}: {what}; {remedy}")
        self.code = code
