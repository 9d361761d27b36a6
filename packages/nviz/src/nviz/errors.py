"""The one kind of error that nviz shows to its user, with a stable code."""


class VizError(Exception):
    """A problem the user can mend: what was wrong, where, and what to do about it.

    `code` is stable; `what` and `remedy` are the two halves of the message.
    """

    def __init__(self, code: str, what: str, remedy: str) -> None:
        super().__init__(f"{code}: {what}; {remedy}")
        self.code = code
        self.what = what
        self.remedy = remedy

    @property
    def arguments(self) -> tuple[str, str, str]:
        """What makes an equal error, for another process."""
        return self.code, self.what, self.remedy
