"""Every public name is exported, documented in the code, and, for the cache, in docs/cache-api.md."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway

PACKAGE = Path(headway.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
EXEMPT = {"overload", "override", "setter", "deleter"}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_modules() -> Iterator[str]:
    """Yield the name of every module without a part that starts with an underscore."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def source_of(module: str) -> ast.Module:
    base = PACKAGE.parent.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield every public class, function and method, with its dotted name in the module."""
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if not decorators & EXEMPT:
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{prefix}{node.name}.")


MODULES = list(public_modules())


@pytest.mark.parametrize("module", MODULES)
def test_exported_names_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert hasattr(loaded, "__all__"), f"{module} has no __all__"
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert len(set(loaded.__all__)) == len(loaded.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_exported(module: str) -> None:
    loaded = importlib.import_module(module)
    defined = [name for name, _ in public_definitions(source_of(module).body) if "." not in name]
    assert [name for name in defined if name not in loaded.__all__] == []


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module: str) -> None:
    tree = source_of(module)
    assert ast.get_docstring(tree), f"{module} has no docstring"
    bare = [name for name, node in public_definitions(tree.body) if not ast.get_docstring(node)]
    assert bare == []


def test_the_cache_is_documented() -> None:
    page = (ROOT / "docs" / "cache-api.md").read_text(encoding="utf-8")
    names = importlib.import_module("headway.cache").__all__
    assert [name for name in names if not re.search(rf"\b{re.escape(name)}\b", page)] == []
