"""Record how vLLM itself pages models: `tests/replay/config/vllm_pages.json`, which the page rules are tested against.

    PYTHONPATH=UNPACKED_VLLM python tools/record_vllm_pages.py tests/replay/config/vllm_pages.json

Run once for each version. UNPACKED_VLLM is a folder with vLLM's Python files; no compiled kernel and no GPU is used.
What is vLLM's own: the shapes of states (`MambaStateShapeCalculator`), the block of hybrid models
(`Platform.update_block_size_for_backend`), the grouping of layers and the bytes of a block (`get_kv_cache_groups`,
`_pool_bytes_per_block`). What is made up: the model, an object with the numbers of layers and heads below. Its
attention backends are FlashAttention and FlashMLA.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

# Layers, heads and dimensions as the models' configs have them: not read from Headway's catalogue, which is judged too.
# attention: layers, key/value heads, numbers of a head's keys and values (mla: numbers of the latent row).
MODELS: dict[str, dict[str, Any]] = {
    "kimi-linear": {"mla": (7, 576), "kda": (20, 32, 128)},
    "kimi-k3": {"mla": (24, 576), "kda": (69, 96, 128)},
    "ling-3.0-flash": {"mla": (7, 576), "kda": (35, 32, 128)},
    "qwen3-next": {"gqa": (12, 2, 256), "gdn": (36, 16, 32, 128, 128)},
    "qwen3.5-397b": {"gqa": (15, 2, 256), "gdn": (45, 16, 64, 128, 128)},
    "qwen3.5-27b": {"gqa": (16, 4, 256), "gdn": (48, 16, 48, 128, 128)},
    "jamba-v0.1": {"gqa": (4, 8, 128), "mamba1": (28, 8192, 16)},
    "bamba-9b": {"gqa": (3, 8, 128), "mamba2": (29, 128, 64, 128, 1)},
    "nemotron-3-nano": {"gqa": (6, 2, 128), "mamba2": (23, 64, 64, 128, 8)},
    "granite-4.0-h-small": {"gqa": (4, 8, 128), "mamba2": (36, 128, 64, 128, 1)},
    "falcon-h1-34b": {"gqa": (72, 4, 128), "mamba2": (72, 32, 128, 256, 2)},
    "minimax-text-01": {"gqa": (10, 8, 128), "lightning": (70, 64, 128)},
    "minimax-m2": {"gqa": (62, 8, 128)},
    "gpt-oss-120b": {"gqa": (18, 8, 64), "window": (18, 8, 64, 128)},
    "gpt-oss-20b": {"gqa": (12, 8, 64), "window": (12, 8, 64, 128)},
    "gemma-3-27b": {"gqa": (10, 16, 128), "window": (52, 16, 128, 1024)},
    "gemma-4-31b": {"gqa": (10, 4, 512), "window": (50, 16, 256, 1024)},
    "gemma-4-26b-a4b": {"gqa": (5, 2, 512), "window": (25, 8, 256, 1024)},
    "mimo-v2.5": {"gqa": (9, 4, 192, 128), "window": (39, 8, 192, 128)},
    "llama-4-scout": {"gqa": (12, 8, 128), "chunk": (36, 8, 128, 8192)},
}
MODELS["mimo-v2.5"]["window"] = (39, 8, 192, 128, 128)
LAYOUTS = ((1, 1), (4, 1), (8, 1), (8, 8))
"""Tensor- and decode-context-parallel sizes."""
STATES = ("kda", "gdn", "mamba1", "mamba2", "lightning")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    version = ".".join(str(import_module("vllm").__version__).split(".")[:2])
    rows = Rows(target)
    rows.forget(version)
    planner = Planner()
    for name, model in MODELS.items():
        for tp, dcp in LAYOUTS:
            for dtype in ("bf16", "fp8"):
                for caching in (True, False) if set(STATES) & set(model) else (True,):
                    if (found := planner.row(model, tp, dcp, dtype, caching)) is not None:
                        row = {"model": name, "tp": tp, "dcp": dcp, "kv_dtype": dtype, "caching": caching}
                        rows.add({**row, **found}, version)
    print(f"{target}: {rows.write()} rows of vLLM {version}")
    return 0


class Rows:
    """The recorded rows: a row names all versions that gave it."""

    def __init__(self, target: Path) -> None:
        """Read what is there."""
        self._target = target
        found = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
        self._versions = {self._key(row): versions for row in found if (versions := row.pop("versions"))}

    def forget(self, version: str) -> None:
        """Take a version out."""
        left = {key: [v for v in versions if v != version] for key, versions in self._versions.items()}
        self._versions = {key: versions for key, versions in left.items() if versions}

    def add(self, row: dict[str, Any], version: str) -> None:
        """Add what a version gave."""
        self._versions.setdefault(self._key(row), []).append(version)

    def write(self) -> int:
        """Write all rows, in order. Returns how many there are."""
        lines = [
            f'{key[:-1]}, "versions": {json.dumps(sorted(versions))}}}' for key, versions in self._versions.items()
        ]
        self._target.write_text("[\n" + ",\n".join(sorted(lines)) + "\n]\n", encoding="utf-8")
        return len(lines)

    @staticmethod
    def _key(row: dict[str, Any]) -> str:
        return json.dumps(row)


class Planner:
    """vLLM's own functions, over models that are made up."""

    def __init__(self) -> None:
        """Import them."""
        self.torch: Any = import_module("torch")
        self.specs: Any = import_module("vllm.v1.kv_cache_interface")
        self.shapes: Any = import_module("vllm.model_executor.layers.mamba.mamba_utils").MambaStateShapeCalculator
        self.platform: Any = import_module("vllm.platforms.interface").Platform
        self.registry: Any = import_module("vllm.model_executor.models").ModelRegistry
        utils: Any = import_module("vllm.v1.core.kv_cache_utils")
        self.planning: Any = utils if hasattr(utils, "get_kv_cache_groups") else self._planning()
        flash: Any = import_module("vllm.v1.attention.backends.flash_attn").FlashAttentionBackend
        latent: Any = import_module("vllm.v1.attention.backends.mla.flashmla").FlashMLABackend
        self.backends = {"gqa": flash, "mla": latent}
        self.layer: Any = import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
        self.mamba: Any = import_module("vllm.model_executor.layers.mamba.abstract").MambaBase

    @staticmethod
    def _planning() -> Any:
        return import_module("vllm.v1.core.kv_cache_planning")

    def row(self, model: dict[str, Any], tp: int, dcp: int, dtype: str, caching: bool) -> dict[str, Any] | None:
        """Block, page and groups; None for a layout that the model cannot have."""
        kind = "mla" if "mla" in model else "gqa"
        heads = 1 if kind == "mla" else model["gqa"][1]
        if dcp > max(1, tp // heads) or (dcp > 1 and ("window" in model or "chunk" in model)):
            return None
        state = next((name for name in STATES if name in model), None)
        shapes = self._shapes(state, model[state], tp) if state else ()
        config = self._config(model, kind, tp, dcp, dtype, caching, state)
        found = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _: shapes,
            get_mamba_state_dtype_from_config=lambda _: self._state_dtypes(state),
        )
        with mock.patch.object(self.registry, "resolve_model_cls", return_value=(found, "")):
            self.platform.update_block_size_for_backend(config)
        layers = self._layers(model, config, tp, dtype, state, shapes)
        groups = self.planning.get_kv_cache_groups(config, layers)
        return {
            "block_tokens": config.cache_config.block_size,
            "page_bytes": self.planning._pool_bytes_per_block(config, groups),
            "groups": sorted([*group, count] for group, count in Counter(map(self._group, groups)).items()),
        }

    def _group(self, group: Any) -> tuple[str, int]:
        """Kind, and tokens in a block on one rank: 0 for states."""
        spec = next(iter(self.specs.iter_layer_specs(group.kv_cache_spec)))
        names = ("Mamba", "SlidingWindow", "ChunkedLocal")
        kind = next((name for name in names if name in type(spec).__name__), "Full")
        return kind, 0 if kind == "Mamba" else spec.block_size

    def _config(
        self, model: dict[str, Any], kind: str, tp: int, dcp: int, dtype: str, caching: bool, state: str | None
    ) -> Any:
        cache: Any = import_module("vllm.config").CacheConfig(enable_prefix_caching=caching)
        cache.cache_dtype = "fp8" if dtype == "fp8" else "auto"
        cache.mamba_cache_mode = "align" if state and caching else "none"
        cache.mamba_block_size = None
        cache.kv_cache_layout = "LBNHC"
        cache.kv_cache_dtype_skip_layers = []
        heads = 1 if kind == "mla" else max(1, model["gqa"][1] // tp)
        size = model["mla"][1] if kind == "mla" else model["gqa"][2]
        described = SimpleNamespace(
            dtype=self.torch.bfloat16,
            use_mla=kind == "mla",
            is_hybrid=state is not None,
            architecture="made up",
            max_model_len=1 << 20,
            get_num_kv_heads=lambda _: heads,
            get_head_size=lambda: size,
        )
        return SimpleNamespace(
            cache_config=cache,
            model_config=described,
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, tensor_parallel_size=tp),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager="chunk" in model),
            attention_config=SimpleNamespace(hisparse_config=None),
            speculative_config=None,
            compilation_config=SimpleNamespace(static_forward_context=self._modules(kind, state, caching)),
        )

    def _modules(self, kind: str, state: str | None, caching: bool) -> dict[str, Any]:
        """Stand-ins for the layers of the built model, which the choice of the block asks for their backend."""
        backend = self.backends[kind]
        attention = _stand_in(self.layer, get_attn_backend=lambda _: backend)
        found = {"attention": attention}
        if state:
            # GatedDeltaNet on Hopper and Blackwell: FlashInfer's prefill, which exports states every 64 tokens.
            gate: Any = import_module("vllm.v1.attention.backends.gdn_attn")
            every = getattr(gate, "FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", None) if state == "gdn" and caching else None
            ssm = SimpleNamespace(is_ssm=lambda: True)
            more = {"get_attn_backend": lambda _: ssm, "get_prefill_checkpoint_alignment": lambda _: every}
            found["state"] = _stand_in(self.mamba, **more)
        return found

    def _shapes(self, kind: str, sizes: tuple[int, ...], tp: int) -> Any:
        if kind == "kda":
            return self.shapes.kda_state_shape(tp, sizes[1], sizes[2])
        if kind == "gdn":
            return self.shapes.gated_delta_net_state_shape(tp, *sizes[1:], 4)
        if kind == "mamba1":
            return self.shapes.mamba1_state_shape(tp, sizes[1], sizes[2], 4)
        if kind == "mamba2":
            _, heads, size, states, groups = sizes
            return self.shapes.mamba2_state_shape(tp, heads * size, groups, heads, size, states, 4)
        return self.shapes.linear_attention_state_shape(sizes[1], tp, sizes[2])

    def _state_dtypes(self, kind: str | None) -> tuple[Any, ...]:
        floating = self.torch.float32
        return (floating,) if kind == "lightning" else (self.torch.bfloat16, floating)

    def _layers(
        self, model: dict[str, Any], config: Any, tp: int, dtype: str, state: str | None, shapes: Any
    ) -> dict[str, Any]:
        block, specs, cache = config.cache_config.block_size, self.specs, config.cache_config
        stored = self.torch.uint8 if dtype == "fp8" else self.torch.bfloat16
        layers: dict[str, Any] = {}
        for kind in ("gqa", "mla", "window", "chunk"):
            for number in range(model.get(kind, (0,))[0]):
                _, *sizes = model[kind]
                if kind == "mla":
                    spec = specs.MLAAttentionSpec(
                        block_size=block, num_kv_heads=1, head_size=sizes[0], dtype=stored,
                        cache_dtype_str=config.cache_config.cache_dtype,
                    )  # fmt: skip
                else:
                    reach = {} if kind == "gqa" else {"window": "sliding_window", "chunk": "attention_chunk_size"}
                    more = {name: sizes.pop() for name in [reach.get(kind)] if name}
                    heads, size, *value = sizes
                    classes = {
                        "gqa": specs.FullAttentionSpec,
                        "window": specs.SlidingWindowSpec,
                        "chunk": specs.ChunkedLocalAttentionSpec,
                    }
                    spec = classes[kind](
                        block_size=block, num_kv_heads=max(1, heads // tp), head_size=size, dtype=stored,
                        head_size_v=value[0] if value else size, **more,
                    )  # fmt: skip
                layers[f"{kind}.{number}"] = spec
        if state:
            mamba = specs.MambaSpec(
                shapes=shapes,
                dtypes=self._state_dtypes(state),
                block_size=cache.mamba_block_size or config.model_config.max_model_len,
                page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode=cache.mamba_cache_mode,
            )
            layers.update({f"{state}.{number}": mamba for number in range(model[state][0])})
        return layers


def _stand_in(base: Any, **methods: Any) -> Any:
    """An object of an abstract class, with these methods and none of the others."""
    missing = {name: lambda *_: None for name in base.__abstractmethods__ if name not in methods}
    kind = type("StandIn", (base,), {**missing, **methods})
    return object.__new__(kind)


if __name__ == "__main__":
    sys.exit(main())
