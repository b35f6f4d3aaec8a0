"""Record what `headway.vllm` relies on: `src/headway/vllm/interface.json`, from its source and from vLLM's.

    python tools/vllm_interface.py 0.32=FOLDER_OF_vllm 0.33=FOLDER_OF_vllm

Each argument names a release and the folder of its package `vllm`. Run it after a change of the package, and for a new
release; what it writes is read in review. `make test` fails while a name is used that is not on the list.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from headway.vllm.interface import VERSIONS, VllmSource

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "headway" / "vllm"
SPECS = "vllm.v1.kv_cache_interface"
SCHEDULER = "vllm.v1.core.sched.scheduler"

# What the names of the package's variables and attributes hold, as classes of vLLM. Several: each attribute is of one.
HOLDS = {
    "vllm_config": ["vllm.config:VllmConfig"],
    "model_config": ["vllm.config:ModelConfig"],
    "scheduler_config": ["vllm.config:SchedulerConfig"],
    "cache_config": ["vllm.config:CacheConfig"],
    "parallel": ["vllm.config:ParallelConfig"],
    "parallel_config": ["vllm.config:ParallelConfig"],
    "speculative": ["vllm.config:SpeculativeConfig"],
    "kv_cache_config": [f"{SPECS}:KVCacheConfig"],
    "planned": [f"{SPECS}:KVCacheGroupSpec"],
    "request": ["vllm.v1.request:Request"],
    "session": ["vllm.v1.request:Request"],
    "parameters": ["vllm.sampling_params:SamplingParams"],
    "aux_output_config": ["vllm.config.aux_output:AuxOutputConfig"],
    "mm_features": ["vllm.multimodal.inputs:MultiModalFeatureSpec"],
    "status": ["vllm.v1.request:RequestStatus"],
    "mm_position": ["vllm.multimodal.inputs:PlaceholderRange"],
    "lora": ["vllm.lora.request:LoRARequest"],
    "stats": ["vllm.v1.metrics.stats:PrefixCacheStats", "vllm.v1.metrics.stats:SchedulerStats"],
    "scheduler_stats": ["vllm.v1.metrics.stats:SchedulerStats"],
    "events_config": ["vllm.config:KVEventsConfig"],
    "engine_client": ["vllm.engine.protocol:EngineClient"],
    "handler": [
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion",
    ],
    "answer": [
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse",
        "vllm.entrypoints.openai.completion.protocol:CompletionResponse",
        "vllm.entrypoints.serve.engine.protocol:ErrorResponse",
    ],
    "output": ["vllm.v1.core.sched.output:SchedulerOutput"],
    "scheduler_output": ["vllm.v1.core.sched.output:SchedulerOutput"],
    "model_runner_output": ["vllm.v1.outputs:ModelRunnerOutput"],
}

# What vLLM asks of what the package puts in its place.
ASKED = [
    f"{SCHEDULER}>kv_cache_manager",
    f"{SCHEDULER}>KVCacheManager",
    f"{SCHEDULER}>_mamba_block_aligned_split",
    f"{SCHEDULER}>_connector_finished",
    "vllm.v1.core.sched.async_scheduler>kv_cache_manager",
    "vllm.v1.engine.core>Scheduler",
    "vllm.v1.metrics.loggers>stat_logger",
    "vllm.plugins>plugin",
    "vllm.plugins.endpoint_plugins.interface>plugin",
    "vllm.entrypoints.openai.chat_completion.api_router>app",
    "vllm.entrypoints.openai.completion.api_router>app",
    "vllm.v1.engine.core>kv_cache_manager",
    "vllm.v1.engine.core>cache_manager",
]
# Fields that are given by keywords, and members of enumerations.
GIVEN = {
    "vllm.distributed.kv_events:BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id lora_name "
    "medium extra_keys group_idx kv_cache_spec_kind",
    "vllm.distributed.kv_events:BlockRemoved": "block_hashes medium group_idx",
    "vllm.v1.engine:EngineCoreOutput": "request_id new_token_ids finish_reason events kv_transfer_params",
    "vllm.v1.engine:EngineCoreOutputs": "outputs",
    "vllm.v1.engine:EngineCoreEventType": "QUEUED SCHEDULED",
    "vllm.v1.engine:FinishReason": "LENGTH",
}
# What does the work that the package plans: no name of it is used, but its meaning is relied on.
BEHIND = [
    *(f"{owner}.{member}" for owner, members in GIVEN.items() for member in members.split()),
    "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
    "vllm.v1.worker.worker_base:WorkerBase.vllm_config",
    f"{SCHEDULER}:Scheduler.running",
    f"{SCHEDULER}:Scheduler._free_blocks",
]


def used_names(package: Path = PACKAGE) -> Iterator[tuple[str, list[str]]]:
    """Every use of vLLM in the package: where, and the keys of which one must be on the list."""
    for path in sorted(package.glob("*.py")):
        if path.name != "interface.py":
            tree = ast.parse(path.read_text())
            names = dict(_imported(tree))
            texts = [text for text in _texts(tree) if text.isidentifier()]
            specs = [f"{SPECS}:{text}" for text in texts if text.endswith(("Spec", "Specs"))]
            holds = {**HOLDS, "spec": specs, **dict.fromkeys(_iterated(tree, "inner"), specs)}
            holds |= dict.fromkeys(_iterated(tree, "mm_features"), HOLDS["mm_features"])
            yield from ((path.name, [key]) for key in names.values() if ":" in key)
            yield from ((path.name, [key]) for key in specs)
            ends = [text for text in texts if text.startswith("FINISHED_")]
            yield from ((path.name, [f"{HOLDS['status'][0]}.{text}"]) for text in ends)
            for node in ast.walk(tree):
                yield from ((path.name, keys) for keys in _inherited(node, names))
                for name, member in _accesses(node):
                    if name in names and ":" not in names[name]:
                        yield path.name, [f"{names[name]}:{member}"]
                    elif keys := [f"{held}.{member}" for held in holds.get(name, ())]:
                        yield path.name, keys


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local name to the module or the `module:Name` of vLLM that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.asname, a.name) for a in node.names if a.asname and a.name.split(".")[0] == "vllm")


def _iterated(tree: ast.Module, name: str) -> list[str]:
    """The names that loops over `name`, or over an attribute of that name, give to its items."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.comprehension | ast.For)]
    over = [node for node in loops if ast.unparse(node.iter).rpartition(".")[2] == name]
    return [node.target.id for node in over if isinstance(node.target, ast.Name)]


def _texts(tree: ast.Module) -> list[str]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _accesses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """`x.member` and `getattr(x, "member")`, where `x` is a name or an attribute's name."""
    value, member = None, ""
    if isinstance(node, ast.Attribute):
        value, member = node.value, node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        value, text = node.args[0], node.args[1]
        member = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    if name and member and not member.startswith("__") and (name, member) != ("status", "name"):
        yield name, member


def _bases(node: ast.AST, names: dict[str, str]) -> list[str]:
    """The classes of vLLM that a class derives from."""
    bases = []
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id in names:
            bases.append(f"{names[base.value.id]}:{base.attr}")
        elif isinstance(base, ast.Name) and base.id in names:
            bases.append(names[base.id])
    return bases


def _methods(node: ast.AST) -> list[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [one.name for one in body if isinstance(one, ast.FunctionDef) and not one.name.startswith("__new")]


def _inherited(node: ast.AST, names: dict[str, str]) -> Iterator[list[str]]:
    """What a subclass of a class of vLLM takes from it by `self` or by `super()`."""
    bases, own = _bases(node, names), {*_methods(node), *_annotated(node)}
    for inner in ast.walk(node) if bases else ():
        if isinstance(inner, ast.Attribute) and not inner.attr.startswith("__new"):
            taken = ast.unparse(inner.value) == "self" and inner.attr not in own
            if taken or ast.unparse(inner.value) == "super()":
                yield [f"{base}.{inner.attr}" for base in bases]


def _annotated(node: ast.AST) -> list[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [one.target.id for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def replaced_names(package: Path = PACKAGE) -> Iterator[str]:
    """The methods that subclasses of vLLM's classes have: on the list if vLLM has them too."""
    for path in sorted(package.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = dict(_imported(tree))
        for node in ast.walk(tree):
            yield from (f"{base}.{method}" for base in _bases(node, names) for method in _methods(node))


def record(releases: dict[str, Path]) -> dict[str, str | dict[str, str]]:
    """The list, from the sources of vLLM: release to the folder of its package `vllm`.

    Raises:
        ValueError: The package uses a name that no release has.
    """
    found: dict[str, dict[str, str]] = {}
    for release, folder in releases.items():
        source = VllmSource(folder)
        for key in [*[key for _, keys in used_names() for key in keys], *replaced_names(), *BEHIND]:
            if shape := source.shape(key):
                found.setdefault(key, {})[release] = shape
        for place in ASKED:
            for key, shape in source.uses(place).items():
                found.setdefault(key, {})[release] = shape
    missing = [f"{where}: {' or '.join(keys)}" for where, keys in used_names() if not any(key in found for key in keys)]
    if missing:
        raise ValueError("no release of vLLM has " + "; ".join(dict.fromkeys(missing)))
    same = {key for key, shapes in found.items() if len(shapes) == len(releases) and len(set(shapes.values())) == 1}
    return {key: next(iter(shapes.values())) if key in same else shapes for key, shapes in sorted(found.items())}


if __name__ == "__main__":
    folders = {release: Path(folder) for release, _, folder in (text.partition("=") for text in sys.argv[1:])}
    if list(folders) != list(VERSIONS):
        sys.exit("\n".join([str(__doc__), f"needs all of {', '.join(VERSIONS)}"]))
    (PACKAGE / "interface.json").write_text(json.dumps(record(folders), indent=1) + "\n")
