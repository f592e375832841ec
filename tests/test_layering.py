"""The arrows between the rooms: which module may import what. A rule is only worth what it catches, so each is tried
on a source that breaks it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("elastic", "checkpoint", "failure_injection")

# Nothing in the first may import the second.
UPWARD = {"checkpoint": ("elastic", "failure_injection"), "elastic": ("failure_injection",)}
PURE = ("elastic.planning", "elastic.control.state", "elastic.control.messages", "elastic.control.outcome")
IMPURE = ("torch", "ray", "etcd3", "os", "time", "threading")
# These are imported nowhere else.
HOMES = {
    "etcd3": ("elastic.rendezvous",),
    "ray": ("elastic.control", "elastic.cli"),
}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def sources() -> dict[str, str]:
    """Every module of the project by its dotted name; a package by its own."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not functions, nor what is for the type checker."""
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = node.orelse
    for child in children:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_import(child)


def imports(module: str, source: str, is_package: bool = False, lazy: bool = True) -> set[str]:
    """Every module that is imported; ``from a import b`` counts as ``a`` and ``a.b``.

    Args:
        lazy: those in functions and for the type checker too.
    """
    found = set()
    tree = ast.parse(source)
    for node in ast.walk(tree) if lazy else at_import(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*parents, base] if base else parents)
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("__import__", "import_module", "importlib.import_module"):
                found.add(str(node.args[0].value))
    return found


def writes_environ(source: str) -> bool:
    for node in at_import(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            names = [ast.unparse(t.value if isinstance(t, ast.Subscript) else t) for t in targets]
            if isinstance(node, ast.AnnAssign) and node.value is None:
                continue
            if any(name in ("os.environ", "environ") for name in names):
                return True
        if isinstance(node, ast.Call):
            owner, _, method = ast.unparse(node.func).rpartition(".")
            if owner in ("os.environ", "environ") and method in ("update", "setdefault", "pop", "popitem", "clear"):
                return True
            if method in ("putenv", "unsetenv"):
                return True
    return False


def violations(module: str, source: str) -> list[str]:
    """What one module does that it may not, on its own account."""
    found: list[str] = []
    for imported in sorted(imports(module, source)):
        for package, above in UPWARD.items():
            if within(module, package) and within(imported, *above):
                found.append(f"{module} imports {imported}, which lies above it")
        if within(module, *PURE) and within(imported, *IMPURE):
            found.append(f"{module} is pure and imports {imported}")
        for library, homes in HOMES.items():
            if within(imported, library) and not within(module, *homes):
                found.append(f"{module} imports {imported}, which is for {' and '.join(homes)} only")
    if writes_environ(source):
        found.append(f"{module} writes os.environ when it is imported")
    return found


def impure_through(modules: Mapping[str, str]) -> list[str]:
    """Pure modules that reach an impure import through other modules of the project, with the way there."""
    found: list[str] = []
    for start in sorted(module for module in modules if within(module, *PURE)):
        seen = {start}
        ways: list[tuple[str, ...]] = [(start,)]
        for way in ways:
            package = any(other.startswith(way[-1] + ".") for other in modules)
            # A pure module may not be lazily impure either; of others, only what loading them loads counts.
            reached = imports(way[-1], modules[way[-1]], package, lazy=within(way[-1], *PURE))
            bad = sorted(module for module in reached if within(module, *IMPURE))
            if bad and len(way) > 1:
                found.append(f"{start} is pure and reaches {bad[0]} through {' → '.join(way[1:])}")
            # Importing a.b.c runs a and a.b first.
            parents = {name.rsplit(".", n)[0] for name in reached for n in range(1, name.count(".") + 1)}
            for module in sorted((reached | parents) & set(modules) - seen):
                seen.add(module)
                ways.append((*way, module))
    return found


MODULES = sources()


def test_there_is_something_to_check() -> None:
    assert "elastic.job" in MODULES


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_keeps_to_the_arrows(module: str) -> None:
    assert violations(module, MODULES[module]) == []


def test_pure_modules_reach_nothing_impure() -> None:
    assert impure_through(MODULES) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("checkpoint.store", "import elastic", "checkpoint.store imports elastic, which lies above it"),
        (
            "checkpoint.cli",
            "def f():\n    from elastic import errors",
            "checkpoint.cli imports elastic, which lies above it",
        ),
        (
            "elastic.cli",
            "import failure_injection.cli",
            "elastic.cli imports failure_injection.cli, which lies above it",
        ),
        ("elastic.planning.plan", "import torch.nn", "elastic.planning.plan is pure and imports torch.nn"),
        (
            "elastic.control.state",
            "def f():\n    import time",
            "elastic.control.state is pure and imports time",
        ),
        ("elastic.planning.plan", "from os import path", "elastic.planning.plan is pure and imports os"),
        (
            "elastic.engine.worker",
            "import importlib\nimportlib.import_module('etcd3')",
            "elastic.engine.worker imports etcd3, which is for elastic.rendezvous only",
        ),
        (
            "elastic.engine.worker",
            "try:\n    import ray\nexcept ImportError:\n    pass",
            "elastic.engine.worker imports ray, which is for elastic.control and elastic.cli only",
        ),
        *(
            ("elastic.cli", f"import os\n{write}", "elastic.cli writes os.environ when it is imported")
            for write in (
                "os.environ['A'] = 'b'",
                "del os.environ['A']",
                "if True:\n    os.environ.setdefault('A', 'b')",
                "class C:\n    os.environ.update(A='b')",
                "os.environ |= {'A': 'b'}",
                "os.putenv('A', 'b')",
            )
        ),
    ],
)
def test_a_violation_is_caught(module: str, source: str, found: str) -> None:
    assert found in violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("failure_injection.runner", "import elastic.errors, checkpoint.store"),
        ("elastic.cli", "from checkpoint import Checkpoints\nimport ray"),
        ("elastic.rendezvous.client", "import etcd3"),
        ("elastic.control.agent", "import ray, os, time"),
        ("elastic.planning.plan", "import math, heapq\nfrom elastic.errors import PlanError"),
        ("elastic.planning.plan", "import osmosis"),
        ("elastic.control.supervisor", "import os\ndef start():\n    os.environ['A'] = os.environ.get('B', '')"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_impurity_is_caught_through_other_modules() -> None:
    modules = {
        "elastic": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray\ndef f():\n    import etcd3",
        "elastic.planning": "",
        "elastic.planning.plan": "from .cost import cost\nfrom elastic import digest",
        "elastic.planning.cost": "import math",
        "elastic.digest": "import torch",
    }
    assert impure_through(modules) == ["elastic.planning.plan is pure and reaches torch through elastic.digest"]


@pytest.mark.parametrize(
    ("module", "source", "is_package", "expected"),
    [
        ("a.b.c", "from . import d", False, {"a.b", "a.b.d"}),
        ("a.b.c", "from ..x import y", False, {"a.x", "a.x.y"}),
        ("a.b", "from .c import d", True, {"a.b.c", "a.b.c.d"}),
        ("a.b", "from ..c import d", True, {"a.c", "a.c.d"}),
    ],
)
def test_relative_imports_are_resolved(module: str, source: str, is_package: bool, expected: set[str]) -> None:
    assert imports(module, source, is_package) == expected
