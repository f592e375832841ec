"""Every error that a user can meet: code, exit code, and at each place where it is made, a message and a hint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic.cli
import elastic.planning
import elastic.rendezvous  # noqa: F401
from elastic import errors
from elastic.errors import ElasticError

ROOT = Path(__file__).parent.parent
EXIT_CODES = {
    "failed": 1, "internal": 1, "user_code": 1, "non_finite": 1, "node_lost": 1, "fenced": 1,
    "usage": 2, "config": 2, "job": 2, "plan": 2, "plan_invariant": 2, "too_few_nodes": 2, "job_alive": 2,
    "unreachable": 3, "etcd_unreachable": 3, "ray_unreachable": 3, "store_unreachable": 3,
    "lease_gone": 3, "txn_unknown": 3,
    "checkpoint_absent": 4, "checkpoint_incomplete": 5, "checkpoint_corrupt": 6,
    "interrupted": 130,
}  # fmt: skip


def tree(cls: type[ElasticError]) -> Iterator[type[ElasticError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from tree(child)


ALL = {cls.__name__: cls for cls in tree(ElasticError)}


def test_every_class_has_a_code_and_the_exit_code_of_its_kind() -> None:
    shown = {cls.code: cls.exit_code for cls in ALL.values() if cls.__module__.startswith("elastic.")}
    assert shown == EXIT_CODES


def test_the_docstring_draws_the_tree() -> None:
    for name, cls in ALL.items():
        if cls.__module__ == "elastic.errors":
            assert name in (errors.__doc__ or ""), name


def made() -> Iterator[tuple[str, str, ast.Call]]:
    """``(where, class, call)`` of every error that is made in the project."""
    for path in sorted((ROOT / "elastic").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ALL:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.func.id, node


MADE = list(made())


@pytest.mark.parametrize(("where", "name", "call"), MADE, ids=[f"{where} {name}" for where, name, _ in MADE])
def test_every_error_says_what_and_what_next(where: str, name: str, call: ast.Call) -> None:
    assert call.args, f"{where}: {name} without a message"
    if isinstance(call.args[0], ast.Constant) and name != "Interrupted":  # which says all in its name
        assert " " in str(call.args[0].value), f"{where}: a word is no message"
    given = {keyword.arg for keyword in call.keywords} & {"hint", "detail"}
    assert len(call.args) > 1 or given or ALL[name].advice or isinstance(call.args[0], ast.Starred), where


def test_all_of_them_were_found() -> None:
    assert len(MADE) > 60
    assert {"ConfigError", "JobError", "PlanError", "StoreUnreachable"} <= {name for _, name, _ in MADE}
