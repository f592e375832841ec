"""Where the user's code is called: its exceptions become `UserCodeError`, and say what was called."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from elastic.engine.gate import Superseded
from elastic.errors import ElasticError, UserCodeError


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Maps any exception inside to `UserCodeError`; errors of this project pass unchanged."""
    try:
        yield
    except Superseded:
        raise
    except (Exception, SystemExit) as error:
        cause = cause_of(error)
        if isinstance(cause, ElasticError):
            raise cause from None
        raise UserCodeError(
            f"{type(error).__name__} in {what}: {error}",
            "the error is in the job's own code; its traceback follows",
            traceback.format_exc(),
        ) from error


def cause_of(error: BaseException) -> BaseException:
    """The error of this project inside a chain of causes (torch's schedules wrap what a stage raises), or ``error``."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ElasticError):
            return cause
        cause = cause.__cause__
    return error
