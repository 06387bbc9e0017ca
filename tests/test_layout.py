"""The tree follows docs/architecture.md: checked here, so that it cannot drift unseen."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    ROOT / "protos/mammoth_wire",
    ROOT / "services/common/mammoth_policy",
    ROOT / "services/common/mammoth_serving",
    ROOT / "services/ar_stage/mammoth_ar",
    ROOT / "services/dit_stage/mammoth_dit",
    ROOT / "client/mammoth_client",
    ROOT / "operator/mammoth_operator",
]
CONTAINERS = [
    "operator",
    "services",
    "services/common",
    "services/ar_stage",
    "services/dit_stage",
    "protos",
    "client",
    "tests",
]
TOP_LEVEL = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "bench", "charts", "checkpoints",
    "client", "constraints.txt", "docs", "operator", "protos", "pyproject.toml", "services", "tests",
}  # fmt: skip
VAGUE = {"utils", "util", "helpers", "helper", "misc", "common", "core_utils"}
MAX_LINES = 400
MAX_BROAD_HANDLERS = 2


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listing.stdout.splitlines() if (ROOT / line).exists()]


def sources() -> list[Path]:
    """Every module of the product that a person wrote."""
    return sorted(path for package in PACKAGES for path in package.rglob("*.py") if "_pb2" not in path.name)


def test_nothing_stands_at_the_top_that_the_layout_does_not_name():
    assert {path.parts[0] for path in tracked()} <= TOP_LEVEL


@pytest.mark.parametrize("folder", CONTAINERS)
def test_a_container_folder_is_no_package(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def test_tests_are_no_packages():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_module_is_named_like_a_standard_one():
    ours = {path.name for path in PACKAGES}
    assert not ours & sys.stdlib_module_names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
class TestModule:
    def test_says_in_its_docstring_what_it_is(self, path):
        assert ast.get_docstring(ast.parse(path.read_text())), "a module opens with what it owns"

    def test_has_a_name_that_means_something(self, path):
        assert path.stem not in VAGUE

    def test_is_short_enough_to_hold_one_idea(self, path):
        assert len(path.read_text().splitlines()) <= MAX_LINES

    def test_reads_no_environment_at_import(self, path):
        assert not [
            node
            for node in at_import(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when its module is imported."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import(node)


def test_broad_exception_handlers_are_few():
    broad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
    ]
    assert len(broad) <= MAX_BROAD_HANDLERS, broad


def test_every_package_is_typed():
    assert all((package / "py.typed").exists() for package in PACKAGES)
