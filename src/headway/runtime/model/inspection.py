"""Cache groups from the model itself: what it stores is read off a dry run, not off a list of names.

A few tokens go through the model with transformers' own cache. Afterwards the class of each cache layer says what kind
it is, and the tensors in it say how large; the attention calls say how many heads compute and which layers attend to
another's entries. A model that does anything this runtime cannot hold exactly is refused here, with the reason.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from headway.cache import ComputeCost
from headway.errors import ModelError
from headway.runtime.model.attention import AttentionSwitch, Scores, masked_attention
from headway.runtime.model.layout import LayerLayout, LayoutBuilder, ModelLayout
from headway.runtime.model.rotary import has_dynamic_rope, long_rope_of
from headway.runtime.model.short_chunks import short_chunks

__all__ = ["cache_argument", "inspect_model", "raised_in", "require_read_back"]

_PROBE_TOKENS = 8
"""Tokens of the dry run: more than any short convolution is wide, so that its state has its full size."""

_KNOWN_LAYERS = (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_EXPERTS = re.compile(r"(^|\.)experts\.")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class _Attended:
    """One attention call: query heads, widths of keys and values as computed with, and the keys."""

    heads: int
    width: int
    keys: torch.Tensor


class _ProbeCache(DynamicCache):
    """transformers' own cache, which notes who updates it and whether a model asks for its length."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.returned: list[tuple[int, torch.Tensor]] = []
        self.updated: int | None = None
        self.asked_length = False

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updated = layer_idx
        returned = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.returned.append((layer_idx, returned[0]))
        return returned

    def owner(self, keys: torch.Tensor) -> int | None:
        """Return the layer that was handed these keys, or None. Tensors without numbers have no address to compare."""
        for layer, held in reversed(self.returned):
            if held is keys or (keys.data_ptr() != 0 and held.data_ptr() == keys.data_ptr()):
                return layer
        return None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked_length = True
        return int(super().get_seq_length(layer_idx))


class _SpoiledCache(_ProbeCache):
    """A cache behind whose back all that layers have handed to it becomes NaN; what it returns are copies.

    Args:
        config: The model's config.
        only: The layer of which this holds; None for all.
    """

    def __init__(self, config: Any, only: int | None = None) -> None:
        super().__init__(config=config)
        self._only = only

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        returned = super().update(key_states.clone(), value_states.clone(), layer_idx, *args, **kwargs)
        if self._only is None or self._only == layer_idx:
            for given in (key_states, value_states):
                _distinct(given).fill_(torch.nan)
        return returned


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without dimensions that repeat it."""
    for dimension, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dimension, 0, 1) if stride == 0 else tensor
    return tensor


@dataclass
class _ProbeContext:
    """Attention of the dry run: causal, noting every call."""

    cache: _ProbeCache
    name: str
    calls: dict[int, _Attended] = field(default_factory=dict)

    def attend(
        self, layer: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        index = layer if self.cache.updated is None else self.cache.updated
        if index is None:
            raise ModelError("a part of it attends to more than the entries of cached tokens")
        self.cache.updated = None
        self.calls[index] = _Attended(query.shape[1], key.shape[-1] + value.shape[-1], key)
        queries, columns = query.shape[2], key.shape[2]
        mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)
        return masked_attention(query, key, value, scores, mask[None, None])


@dataclass(frozen=True)
class _DryRun:
    """What a dry run left: the cache, the attention calls, and the logits of the last token."""

    cache: _ProbeCache
    context: _ProbeContext
    logits: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.logits.shape[-1])


def inspect_model(model: PreTrainedModel, tp: int = 1) -> ModelLayout:
    """Read a model's layers, groups, sizes and costs off a dry run.

    Args:
        model: The model, on any device. It is put into evaluation mode; nothing else changes.
        tp: Tensor-parallel size that the sizes are for: of an engine that divides all heads and states by it.

    Raises:
        ModelError: The model keeps something that this runtime cannot hold, or the dry run fails; with the reason.
        ConfigError: `tp` does not fit the model's heads.
    """
    model.train(False)
    run = _dry_run(model)
    name, calls = run.context.name, run.context.calls
    builder = LayoutBuilder(tp)
    layers = tuple(_layer(index, run, model, builder) for index in range(len(run.cache.layers)))
    groups = builder.groups()
    if not groups:
        raise ModelError(
            f"{name} left transformers' cache empty in a dry run: it keeps its state where no cache can reach it"
        )
    active, held = _active_parameters(model), sum(p.numel() for p in model.parameters())
    full = [i for i, layer in enumerate(layers) if _attends_in_full(layer, layers)]
    return ModelLayout(
        model=name,
        layers=layers,
        groups=groups,
        dtype=model.dtype,
        vocab_size=run.vocab_size,
        max_tokens=getattr(_text_config(model), "max_position_embeddings", None),
        parameters=held,
        active_parameters=active,
        cost=ComputeCost(2.0 * active, sum(2.0 * calls[i].heads * calls[i].width for i in full)),
        uniform_starts=run.cache.asked_length,
        tp=tp,
        rank_parameters=held,
        long_rope=long_rope_of(model, cache_argument(model)),
        dynamic_rope=has_dynamic_rope(model),
    )


def require_read_back(model: PreTrainedModel, option: str) -> None:
    """Refuse a model whose layers go on with keys and values as they were before they went through the cache.

    What is stored as another type is then not what is computed with, and an answer would depend on which tokens came
    from the cache.

    Args:
        model: The model, with its weights.
        option: The option that asks for it, for the message.

    Raises:
        ModelError: It is such a model; the message names the first such layer.
    """
    layers = range(len(_dry_run(model, _ProbeCache(model.config)).cache.layers))
    if _is_read_back(model, None):
        return
    found = next((layer for layer in layers if not _is_read_back(model, layer)), 0)
    raise ModelError(
        f"{option}: layer {found} of {type(model).__name__} goes on with its keys and values as they were before they "
        f"were stored, so its answers would depend on which tokens come from the cache: leave the option out"
    )


def _is_read_back(model: PreTrainedModel, layer: int | None) -> bool:
    try:
        return bool(_dry_run(model, _SpoiledCache(model.config, layer)).logits.isfinite().all())
    except ModelError:  # raised by what NaN meets
        return False


@torch.no_grad()
def _dry_run(model: PreTrainedModel, cache: _ProbeCache | None = None) -> _DryRun:
    """Run a prompt of `_PROBE_TOKENS` tokens and one token after it."""
    name = type(model).__name__
    tokens = torch.arange(1, _PROBE_TOKENS + 2, device=model.device)[None]
    positions = torch.arange(_PROBE_TOKENS + 1, device=model.device)[None]
    cut = (slice(None), slice(0, _PROBE_TOKENS)), (slice(None), slice(_PROBE_TOKENS, None))
    logits = torch.empty(0)
    try:
        cache = _ProbeCache(model.config) if cache is None else cache
        context = _ProbeContext(cache, name)
        with AttentionSwitch(model).attending(context), short_chunks(model, _PROBE_TOKENS):
            for part in cut:
                output = model(
                    input_ids=tokens[part],
                    position_ids=positions[part],
                    use_cache=True,
                    **{cache_argument(model): cache},
                )
                logits = output["logits"][0, -1]
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    except Exception as error:
        raise ModelError(f"{name} cannot be served: {_reason(model, error)}") from error
    return _DryRun(cache, context, logits)


def _reason(model: PreTrainedModel, error: Exception) -> str:
    """Why a model fails over a cache and an attention that are not its own: it is tried with its own ones.

    Args:
        model: The model.
        error: What its dry run raised.
    """
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=model.device)[None]
    own: Any = None
    for given in (False, True):
        try:
            held = {cache_argument(model): DynamicCache(config=model.config)} if given else {}
            own = model(input_ids=tokens, use_cache=True, **held)
        except Exception as failure:
            if own is None:
                return f"transformers itself cannot compute a short text with it: {failure}"
            kept = type(own.get("past_key_values", own.get(cache_argument(model)))).__name__
            return f"it keeps what it has computed in a cache of its own ({kept}), which Headway cannot fill"
    place = raised_in(error)
    parts = [] if place is None else [*dict(place.named_modules()), type(place).__name__]
    sparse = " for sparse attention over an index" if any("index" in part.lower() for part in parts) else ""
    part = "network" if place is None else type(place).__name__
    return f"its {part} works on an attention mask{sparse}; Headway computes what a token sees without one"


def raised_in(error: Exception) -> torch.nn.Module | None:
    """The innermost module of a model that was running when an error was raised, or None."""
    found: torch.nn.Module | None = None
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        found = module if isinstance(module, torch.nn.Module) else found
        frame = frame.tb_next
    return found


def _layer(index: int, run: _DryRun, model: PreTrainedModel, builder: LayoutBuilder) -> LayerLayout:
    """What one layer keeps, added to the builder's groups.

    Raises:
        ModelError: Something that the runtime cannot hold.
    """
    layer: Any = run.cache.layers[index]
    kind, name = type(layer).__name__, run.context.name
    if type(layer) not in _KNOWN_LAYERS:
        raise ModelError(f"{name}: layer {index} keeps a {kind}, which this runtime cannot hold yet")
    call = run.context.calls.get(index)
    tokens = state = entries_of = None
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        if call is None:
            raise ModelError(
                f"{name} cannot be served: layer {index} does not attend through transformers' attention interface, so "
                "Headway cannot hand it what is cached"
            )
        need, size = _need(index, layer, model)
        held = (("keys", layer.keys), ("values", layer.values))
        tokens = builder.tokens(need, size, [(n, (t.shape[1], t.shape[3]), t.dtype) for n, t in held if t is not None])
    elif call is not None:
        entries_of = run.cache.owner(call.keys)
        if entries_of is None:
            raise ModelError(f"{name}: layer {index} attends to keys that no layer of the cache returned")
    if isinstance(layer, LinearAttentionLayer) and (fields := _state_fields(layer)):
        state = builder.state(fields)
    return LayerLayout(index, kind, tokens, state, entries_of, 0 if call is None else call.heads)


def _state_fields(layer: LinearAttentionLayer) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    held = [("conv", i, t) for i, t in layer.conv_states.items()]
    held += [("recurrent", i, t) for i, t in layer.recurrent_states.items()]
    return [(f"{kind}:{i}", tuple(t.shape[1:]), t.dtype) for kind, i, t in held if t is not None]


def _need(index: int, layer: DynamicLayer, model: PreTrainedModel) -> tuple[str, int]:
    """What a layer's queries see: `full`, or `window` or `chunk` with its size.

    One cache class serves windows and chunks, so the config's word for the layer decides between these two.
    """
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return "full", 0
    config = _text_config(model)
    types = getattr(config, "layer_types", None)
    if types is not None:  # a cache may have more layers than the config, for layers that are gone through again
        chunked = "chunked_attention" in types and types[index] == "chunked_attention"
    else:
        chunked = getattr(config, "sliding_window", None) is None and hasattr(config, "attention_chunk_size")
    return ("chunk" if chunked else "window"), int(layer.sliding_window)


def _attends_in_full(layer: LayerLayout, layers: tuple[LayerLayout, ...]) -> bool:
    source = layer if layer.entries_of is None else layers[layer.entries_of]
    return source.tokens is not None and source.tokens.group == "full"


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _active_parameters(model: PreTrainedModel) -> int:
    """Parameters that one token multiplies with: all but unchosen experts and an untied embedding table."""
    config, network = _text_config(model), cast("Any", model)
    chosen = next((value for name in _TOP_K if isinstance(value := getattr(config, name, None), int)), None)
    output, table = network.get_output_embeddings(), network.get_input_embeddings()
    tied = output is not None and output.weight is table.weight
    total = 0 if tied else -sum(p.numel() for p in table.parameters())
    experts = {m.group(1) for n, _ in model.named_parameters() if (m := re.search(r"experts\.(\d+)\.", n))}
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if chosen is not None and _EXPERTS.search(name):
            available = len(experts) or parameter.shape[0]
            size = size * min(chosen, available) // available
        total += size
    return total


def cache_argument(model: PreTrainedModel) -> str:
    """Name under which the model takes its cache: `cache`, or `past_key_values` in older versions of transformers."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
