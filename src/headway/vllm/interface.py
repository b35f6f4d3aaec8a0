"""What of vLLM this package relies on, as a recorded list, and what of it the installed vLLM has moved.

vLLM declares its scheduler's interface as not public. So every class, method, keyword and attribute that the package
uses, and all that vLLM asks of what the package puts in its place, stands in `interface.json` with its shape in each
supported release. At the start the same shapes are read from the source files of the installed vLLM and compared,
before anything of it is trusted. Rejected: `inspect`, which sees no attribute that a constructor sets, and no call.

Keys of the list:

- `module:Name` and `module:Class.member` are what must exist. A member may come from a base class. The shape of a
  function is its signature, where `=` stands for a default; that of a dataclass or a named tuple are its own fields,
  since a new field may be a new rule; all else is "class" or "attribute" (fields, properties, `self.x = ...`).
- `module>name.member` is what a module of vLLM asks of `name`. A call has the largest number of arguments by position
  and all keywords as its shape; all else is "read".

A shape that differs between releases is an object with one shape per release; a release that lacks the thing is absent.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from headway.errors import ConfigError

__all__ = ["VERSIONS", "VllmSource", "check_version", "find_moved", "recorded"]

_LIST: dict[str, str | dict[str, str]] = json.loads(Path(__file__).with_name("interface.json").read_text())
VERSIONS = ("0.32", "0.33")
"""Releases of vLLM that work, the oldest first."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def recorded(release: str) -> dict[str, str]:
    """The list for a release, such as "0.33", or for the newest one if the release is unknown: key to shape."""
    release = release if release in VERSIONS else VERSIONS[-1]
    found = {key: shape if isinstance(shape, str) else shape.get(release) for key, shape in _LIST.items()}
    return {key: shape for key, shape in found.items() if shape is not None}


def check_version() -> None:
    """Refuse a vLLM that this package was not written against, or that has moved what the package relies on.

    Raises:
        ConfigError: No vLLM, or another one; names the releases that work, and what has moved.
    """
    works = " and ".join(VERSIONS)
    try:
        vllm = import_module("vllm")
    except ImportError as error:
        raise ConfigError(f"headway.vllm needs vLLM ({works}) in the same environment: {error}") from error
    version = str(vllm.__version__)
    release = ".".join(version.lstrip("v").split("+")[0].split(".")[:2])
    moved = find_moved(VllmSource(Path(vllm.__path__[0])), recorded(release))
    if release in VERSIONS and not moved:
        return
    what = "; ".join(moved) or "nothing that Headway relies on has another name, but nobody has tried it"
    raise ConfigError(f"headway.vllm works with vLLM {works}, and this is {version}: install one of these ({what})")


def find_moved(source: VllmSource, expected: dict[str, str]) -> list[str]:
    """What has moved in `source`, one sentence for each thing, in the order of the list; empty if nothing has."""
    found = {key: source.shape(key) for key in expected if ":" in key}
    for place in dict.fromkeys(_place(key) for key in expected if ">" in key):
        found.update(source.uses(place))
    gone = [(key, shape) for key, shape in expected.items() if found.get(key) != shape]
    moved = [f"{key} {_change(shape, now)}" if (now := found.get(key)) else f"{key} is gone" for key, shape in gone]
    return moved + [f"{key} is new: {shape}" for key, shape in found.items() if key not in expected and shape]


def _change(was: str, now: str) -> str:
    """What a shape has lost and got; both shapes if only their order or their kind differs."""
    plain = (shape.replace("call(", "arguments by position: ").replace(") ->", ", ->") for shape in (was, now))
    old, new = (shape.strip("()").split(", ") for shape in plain)
    lost, got = ([one for one in a if one not in b] for a, b in ((old, new), (new, old)))
    said = [f"{verb} {', '.join(words)}" for verb, words in (("lost", lost), ("got", got)) if words]
    return " and ".join(said) or f"is now {now}, and was {was}"


def _place(key: str) -> str:
    """`module>name` of `module>name.member`."""
    module, _, used = key.partition(">")
    return f"{module}>{used.split('.')[0]}"


class VllmSource:
    """The source files of vLLM, each read when it is first asked for."""

    def __init__(self, package: Path) -> None:
        """`package`: the folder of the package `vllm`."""
        self._package = package
        self._trees: dict[str, ast.Module | None] = {}

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._package.joinpath(*module.split(".")[1:])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[module] = ast.parse(path.read_text()) if path.is_file() else None
        return self._trees[module]

    def shape(self, key: str) -> str | None:
        """The shape of `module:Name` or `module:Class.member`, or None if there is no such thing."""
        module, _, name = key.partition(":")
        owner, _, member = name.partition(".")
        found = self._find(module, owner)
        if found is None or not member:
            return _shape(found[1]) if found else None
        return self._member(*found, member)

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module and the statement that defines a name, behind all imports of it."""
        tree = self._tree(module)
        for node in _statements(tree.body) if tree else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(node.module, alias.name)
            if name in _defined(node):
                return module, node
        return None

    def _member(self, module: str, owner: ast.stmt, member: str) -> str | None:
        """The shape of a member of a class or of one of its bases."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in _statements(owner.body):
            if member in _defined(node):
                return _shape(node)
        if any(_is_self(node, member) for node in ast.walk(owner)):
            return "attribute"
        for base in owner.bases:
            found = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if found and (shape := self._member(*found, member)):
                return shape
        return None

    def uses(self, place: str) -> dict[str, str]:
        """What `module>name` is asked for: `module>name.member`, or without a member if it is called, to shape."""
        module, _, name = place.partition(">")
        tree = self._tree(module)
        found: dict[str, list[ast.Call | None]] = {}
        for chain, call in _chains(tree, None) if tree else ():
            if name in chain:
                found.setdefault(".".join(chain[chain.index(name) :]), []).append(call)
        return {f"{module}>{used}": _usage(calls) for used, calls in found.items() if used != name or any(calls)}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module or a class, those behind `if` and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers"):
            if isinstance(node, ast.If | ast.Try):
                for inner in getattr(node, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | Function):
        return [node.name]
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _shape(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        marks = " ".join(ast.unparse(one) for one in node.decorator_list + node.bases)
        if "dataclass" not in marks and "NamedTuple" not in marks:
            return "class"
        return f"class({', '.join(ast.unparse(one.target) + '=' * (one.value is not None) for one in fields)})"
    if not isinstance(node, Function) or any("property" in ast.unparse(one) for one in node.decorator_list):
        return "attribute"
    args = node.args
    named = [one.arg for one in args.posonlyargs + args.args]
    first = len(named) - len(args.defaults)
    named = [name + "=" * (i >= first) for i, name in enumerate(named)]
    if args.vararg or args.kwonlyargs:
        named.append("*" + (args.vararg.arg if args.vararg else ""))
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    named += [one.arg + "=" * (default is not None) for one, default in keywords]
    named += ["**" + args.kwarg.arg] if args.kwarg else []
    return f"({', '.join(named)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def _is_self(node: ast.AST, member: str) -> bool:
    """Whether a node is `self.member` as the target of an assignment."""
    if not (isinstance(node, ast.Attribute) and node.attr == member and isinstance(node.ctx, ast.Store)):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _chains(node: ast.AST, call: ast.Call | None) -> Iterator[tuple[list[str], ast.Call | None]]:
    """Every name with its attributes (`a.b.c`) that is read or called, with its call."""
    chain: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        chain.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if not isinstance(getattr(node, "ctx", None), ast.Store):
            yield [inner.id, *chain], call
        return
    if chain:  # on something that is no name, such as the result of a call
        yield ["", *chain], call
        node, call = inner, None
    for child in ast.iter_child_nodes(node):
        yield from _chains(child, node if isinstance(node, ast.Call) and child is node.func else None)


def _usage(calls: list[ast.Call | None]) -> str:
    real = [call for call in calls if call]
    if not real:
        return "read"
    most = max(len(call.args) for call in real)
    return f"call({', '.join([str(most), *sorted({word.arg or '**' for call in real for word in call.keywords})])})"
