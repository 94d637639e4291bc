"""Imports go down only: cli > build > train, report > reference > models > data > losses, ops > types, errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "preftune"
# Layers of equal height do not import each other, except where `ALLOWED` says so.
HEIGHT = {
    "errors": 0,
    "types": 1,
    "files": 1,
    "assets": 1,
    "losses": 2,
    "ops": 2,
    "data": 3,
    "models": 4,
    "reference": 5,
    "report": 6,
    "train": 6,
    "integrations": 6,
    "config": 7,
    "build": 8,
    "demo": 9,
    "cli_cache": 10,
    "cli": 11,
    "__main__": 12,
    "__init__": 12,
}
FORBIDDEN = {"ops": {"transformers", "peft", "datasets"}, "losses": {"transformers", "peft"}, "data": {"peft"}}


def modules():
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


def wrong_imports(path: Path, part: str) -> list[str]:
    wrong = []
    for line, module in imports(path):
        top, *rest = module.split(".")
        if top == "preftune":
            other = rest[0] if rest else "errors"
            if other != part and HEIGHT[other] >= HEIGHT[part]:
                wrong.append(f"{path}:{line} imports {module}")
        elif top in FORBIDDEN.get(part, set()):
            wrong.append(f"{path}:{line} imports {module}")
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    part = part_of(path)
    if part in ("__init__", "cli"):
        # The package's front door names what is public; the command prints the version.
        return
    assert wrong_imports(path, part) == []


def test_the_check_sees_an_upward_import(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from preftune.train import Objective\nimport transformers\n")
    found = wrong_imports(path, "losses")
    assert len(found) == 2
    assert any(":2 imports preftune.train" in line for line in found)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= 300, f"{path} is long; split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 60, f"{path}: {node.name} is long"
