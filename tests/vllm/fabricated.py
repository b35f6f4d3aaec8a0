"""A vLLM made up from the recorded list: source files in which everything has the shape that the list says."""

from pathlib import Path


def write_vllm(folder: Path, expected: dict[str, str], version: str) -> Path:
    """Write the package `vllm` into `folder`, and return its own folder."""
    modules: dict[str, dict[str, list[str]]] = {}
    for key, shape in expected.items():
        if ":" in key:
            module, _, name = key.partition(":")
            owner, _, member = name.partition(".")
            members = modules.setdefault(module, {}).setdefault(owner, [])
            if member:
                members.append(_member(member, shape))
            elif not shape.startswith("class"):
                members.append(_member(owner, shape))
            else:
                members[:0] = _fields(shape)
        else:
            module, _, used = key.partition(">")
            modules.setdefault(module, {}).setdefault("", []).append(f"    {used}{_arguments(shape)}")
    for module, owners in modules.items():
        inner = any(other.startswith(f"{module}.") for other in modules)
        path = folder.joinpath(*module.split("."), *["__init__"] * inner).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        blocks = [_block(owner, lines, expected.get(f"{module}:{owner}", "class")) for owner, lines in owners.items()]
        path.write_text("\n".join(["from dataclasses import dataclass", *blocks]) + "\n")
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    return folder / "vllm"


def _block(owner: str, lines: list[str], shape: str) -> str:
    if not owner:
        return "\n".join(["def asks():", *lines])
    if not shape.startswith("class"):
        return lines[0].strip()
    mark = ["@dataclass"] if shape != "class" else []
    return "\n".join([*mark, f"class {owner}:", *lines, "    pass"])


def _fields(shape: str) -> list[str]:
    names = shape[len("class(") : -1].split(", ") if "(" in shape else []
    return [f"    {name.rstrip('=')}: int{' = 0' * name.endswith('=')}" for name in names if name]


def _member(name: str, shape: str) -> str:
    if not shape.startswith("("):
        return f"    {name} = 0"
    arguments, arrow, returns = shape.partition(" -> ")
    return f"    def {name}{arguments.replace('=', '=0')}{arrow}{returns}: ..."


def _arguments(shape: str) -> str:
    if shape == "read":
        return ""
    most, *words = shape[len("call(") : -1].split(", ")
    return f"({', '.join(['0'] * int(most) + [f'{word}=0' for word in words])})"
