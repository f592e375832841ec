"""The exception tree. Every error a user can meet has a code, a message that says what and where, and a hint.

    ElasticError                 exit 1   the job failed
    ├── UsageError               exit 2   the command line or the config is wrong
    │   ├── ConfigError                   a key, a value or a file of the config
    │   ├── JobError                      the user's job cannot be loaded or is refused by name
    │   ├── PlanError                     no plan can ever exist (model too large for the device)
    │   └── JobAlive                      the same job is running already
    ├── Unreachable              exit 3   etcd, Ray or the store does not answer
    │   ├── EtcdUnreachable
    │   ├── RayUnreachable
    │   └── StoreUnreachable
    ├── CheckpointAbsent         exit 4   there is no such checkpoint
    │   ├── CheckpointIncomplete exit 5   a part of it is missing
    │   └── CheckpointCorrupt    exit 6   it is not what was written
    ├── UserCodeError            exit 1   an exception in the user's own code, with its traceback
    ├── NonFinite                exit 1   loss or gradient is not finite and the policy is `stop`
    ├── NodeLost                 exit 1   a member of the running epoch is gone
    └── Interrupted              exit 130 Ctrl-C or SIGTERM

Errors of dependencies (grpc, ray, botocore, pydantic) are mapped to these at the edge where they appear, so that
no caller ever catches a foreign type.
"""

from __future__ import annotations


class ElasticError(Exception):
    """Base of every error of this project.

    Args:
        message: one sentence that says what failed and where.
        hint: what to do next; left out, it is what helps with most errors of the class.
        detail: more lines for a log or ``--json``, such as the traceback of the user's code.
    """

    code = "failed"
    exit_code = 1
    advice = ""  # the hint of those that have none of their own

    def __init__(self, message: str, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint or self.advice
        self.detail = detail

    def as_json(self) -> dict[str, str]:
        """``{code, message, hint[, detail]}``, what ``--json`` prints under ``error``."""
        out = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.detail:
            out["detail"] = self.detail
        return out


class UsageError(ElasticError):
    code = "usage"
    exit_code = 2
    advice = "`elastic COMMAND --help` shows an example"


class ConfigError(UsageError):
    code = "config"
    advice = "correct it there; configs/gpt-bytes.yaml has every key with a comment"


class JobError(UsageError):
    code = "job"
    advice = "correct the job's code, or its params in the config"


class PlanError(UsageError):
    code = "plan"
    advice = "`elastic plan CONFIG --nodes N` shows what fits; change cluster.nodes, cluster.device_memory or the model"


class JobAlive(UsageError):
    code = "job_alive"


class Unreachable(ElasticError):
    code = "unreachable"
    exit_code = 3
    advice = "`elastic doctor` checks what a run needs"


class EtcdUnreachable(Unreachable):
    code = "etcd_unreachable"


class RayUnreachable(Unreachable):
    code = "ray_unreachable"


class StoreUnreachable(Unreachable):
    code = "store_unreachable"


class CheckpointAbsent(ElasticError):
    code = "checkpoint_absent"
    exit_code = 4


class CheckpointIncomplete(CheckpointAbsent):
    code = "checkpoint_incomplete"
    exit_code = 5


class CheckpointCorrupt(CheckpointAbsent):
    code = "checkpoint_corrupt"
    exit_code = 6


class UserCodeError(ElasticError):
    code = "user_code"
    advice = "the traceback is in the worker's log, and under detail with --json"


class NonFinite(ElasticError):
    code = "non_finite"


class NodeLost(ElasticError):
    code = "node_lost"
    advice = "the workers' logs are in the folder logs of the run"


class Interrupted(ElasticError):
    code = "interrupted"
    exit_code = 130
    advice = "run the same command again to go on"


def from_json(error: dict[str, str]) -> ElasticError:
    """Rebuilds an error that crossed a process boundary as ``as_json()``; an unknown code becomes the base class."""

    def tree(cls: type[ElasticError]) -> list[type[ElasticError]]:
        return [cls, *(s for sub in cls.__subclasses__() for s in tree(sub))]

    cls = {c.code: c for c in tree(ElasticError)}.get(error.get("code", ""), ElasticError)
    return cls(error.get("message", "unknown error"), error.get("hint", ""), error.get("detail", ""))
