"""The one error that a user can act on."""

from __future__ import annotations


class Problem(Exception):
    """Something that the user can change. `str()` of it is one clear line; the command line prints it and exits 2.

    `user_traceback` carries the user's own traceback where their code raised it; it is printed first.
    """

    def __init__(self, message: str, *, user_traceback: str | None = None):
        super().__init__(message)
        self.user_traceback = user_traceback
