"""Kimi-K3 (text) a second time: numpy, float64, one token at a time, written from the equations and from nothing else.

It judges the model in `headway.models`; neither may be copied from the other. Only the names of tensors and of
configuration fields, and the shapes of tensors, are taken from the published checkpoint.

What the equations leave open, or what rests on one reading of one source, and what is done here:

Read with a switch (`Reading`):
 1. The epsilon of MLA's two latent norms (`q_a_layernorm`, `kv_a_layernorm`): 1e-6, as in the first published code of
    the family; one engine takes `rms_norm_eps` (`latent_eps=None`).
 2. `A_log` has 128 entries for 96 heads: the first 96, one per head (three sources). One source reads one per channel
    of the key (`a_log="channel"`).
 3. The order of the two 4-bit codes in a byte: the low half comes first, as usual for this format (`low_first`).

Read in one way only:
 4. AttnRes as a whole rests on one engine's code. In particular: a block's input, just stored, is no source for the
    attention of its own layer but is one for that layer's MLP; at a block's start the running sum begins anew with the
    attention's output; scores are those of the normed source, and the sum is of the sources as they are; epsilon is
    `rms_norm_eps`; the output is mixed once more before the last norm.
 5. SiTU stands in the dense MLP and in the shared experts as it does in the routed experts.
 6. `routed_expert_norm` takes `rms_norm_eps`. The routed sum is normed after its weights and `routed_scaling_factor`
    are in it.
 7. The router and the shared experts read the layer's normed input (full width), not the latent.
 8. Both output gates (KDA's, MLA's) read the mixer's normed input. KDA's multiplies after the norm per head.
 9. The low-rank half of the decay gate is as wide as a head (`f_a_proj`: hidden -> head_dim), 128 as published.
10. The scale of MLA is that of the whole query, (nope + rope)^-1/2, although nothing is rotated. No other factor.
11. Projections have no bias.
12. Nothing is rounded. One engine rounds the running sum to the type of the activations after each addition.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

PREFIX = "language_model."
GROUP = 32  # weights per scale in MXFP4


@dataclass(frozen=True)
class Reading:
    """Which of two plausible readings is taken; the numbers are those of the list above."""

    latent_eps: float | None = 1e-6  # 1; None: rms_norm_eps
    a_log: Literal["head", "channel"] = "head"  # 2
    low_first: bool = True  # 3


@dataclass(frozen=True)
class Run:
    """What a run over T tokens gives, float64.

    `logits` is [T, vocab]. `sums` and `mixed` are [T, layers + 1, hidden]: entry 0 is after the embedding, entry l + 1
    after layer l (counted from 0). `sums` is the running sum; `mixed` is what the next layer's attention mixes from it
    and the blocks' inputs, or, after the last layer, what goes to the last norm.
    """

    logits: Array
    sums: Array
    mixed: Array


def logits(folder: Path, tokens: Sequence[int], reading: Reading | None = None) -> Array:
    """Logits [tokens, vocab] of the checkpoint in `folder` (published form), each row after its token."""
    return run(folder, tokens, reading).logits


def run(folder: Path, tokens: Sequence[int], reading: Reading | None = None) -> Run:
    """Like `logits`, with the residual streams that a drafter reads."""
    oracle = Oracle(folder, reading or Reading())
    steps = [oracle.step(token) for token in tokens]
    return Run(*(np.stack(column) for column in zip(*steps, strict=True)))


# --- the folder ---------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """The text part of `config.json`; ValueError if it asks for what the equations here are not of."""
    text: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    linear = text["linear_attn_config"]
    wanted = {
        "hidden_act": "situ",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_renormalize": True,
        "latent_moe_use_norm": True,
        "num_expert_group": 1,
        "moe_layer_freq": 1,
        "tie_word_embeddings": False,
    }
    different = {name: text.get(name, value) for name, value in wanted.items() if text.get(name, value) != value}
    if different or linear["use_full_rank_gate"] is not True:
        raise ValueError(f"these equations are of another model: {different or linear}")
    layers = range(1, text["num_hidden_layers"] + 1)
    if sorted(linear["kda_layers"] + linear["full_attn_layers"]) != list(layers):
        raise ValueError("kda_layers and full_attn_layers must name every layer once, from 1")
    return text


def read_safetensors(file: Path) -> Weights:
    """Every tensor of one file: uint8 as it is, the float types as float64."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    weights: Weights = {}
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        kind = entry["dtype"]
        if kind == "U8":
            values: NDArray[Any] = np.frombuffer(raw, np.uint8)
        elif kind == "BF16":  # the upper half of a float32
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        else:
            values = np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind]).astype(np.float64)
        weights[name] = values.reshape(entry["shape"])
    return weights


def read_weights(folder: Path) -> Weights:
    """The language model's tensors of all shards, names without their prefix; other towers are left out."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, values in read_safetensors(file).items():
            if name in weights:
                raise ValueError(f"{name} stands in two files")
            weights[name] = values
    return {name.removeprefix(PREFIX): values for name, values in weights.items() if name.startswith(PREFIX)}


def published_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Names (without `language_model.`) and shapes of every tensor; `A_log` may be longer than the shape says."""
    hidden = config["hidden_size"]
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, Shape] = {
            "self_attention_res_norm.weight": (hidden,),
            "self_attention_res_proj.weight": (1, hidden),
            "input_layernorm.weight": (hidden,),
            "mlp_res_norm.weight": (hidden,),
            "mlp_res_proj.weight": (1, hidden),
            "post_attention_layernorm.weight": (hidden,),
        }
        of_layer |= _kda_shapes(config) if is_kda(config, layer) else mla_shapes(config, gated=True)
        if layer < config["first_k_dense_replace"]:
            of_layer |= mlp_shapes("mlp", hidden, config["intermediate_size"])
        else:
            of_layer |= _moe_shapes(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def is_kda(config: dict[str, Any], layer: int) -> bool:
    """Whether layer `layer`, counted from 0, is a KDA layer."""
    return layer + 1 in config["linear_attn_config"]["kda_layers"]


def _kda_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    linear = config["linear_attn_config"]
    hidden, heads, size = config["hidden_size"], linear["num_heads"], linear["head_dim"]
    shapes: dict[str, Shape] = {}
    for name in ("q", "k", "v"):
        shapes[f"self_attn.{name}_proj.weight"] = (heads * size, hidden)
        shapes[f"self_attn.{name}_conv1d.weight"] = (heads * size, 1, linear["short_conv_kernel_size"])
    return shapes | {
        "self_attn.b_proj.weight": (heads, hidden),
        "self_attn.f_a_proj.weight": (size, hidden),
        "self_attn.f_b_proj.weight": (heads * size, size),
        "self_attn.A_log": (heads,),
        "self_attn.dt_bias": (heads * size,),
        "self_attn.o_norm.weight": (size,),
        "self_attn.g_proj.weight": (heads * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
    }


def mla_shapes(config: dict[str, Any], gated: bool) -> dict[str, Shape]:
    """Latent attention with a query latent, with or without an output gate."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    gate: dict[str, Shape] = {"self_attn.g_proj.weight": (heads * value, hidden)} if gated else {}
    return gate | {
        "self_attn.q_a_proj.weight": (query, hidden),
        "self_attn.q_a_layernorm.weight": (query,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), query),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def mlp_shapes(name: str, hidden: int, width: int) -> dict[str, Shape]:
    """A gated MLP."""
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def _moe_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    hidden, latent = config["hidden_size"], config["routed_expert_hidden_size"]
    width, experts = config["moe_intermediate_size"], config["num_experts"]
    moe = "block_sparse_moe"
    shapes: dict[str, Shape] = {
        f"{moe}.gate.weight": (experts, hidden),
        f"{moe}.gate.e_score_correction_bias": (experts,),
        f"{moe}.routed_expert_down_proj.weight": (latent, hidden),
        f"{moe}.routed_expert_norm.weight": (latent,),
        f"{moe}.routed_expert_up_proj.weight": (hidden, latent),
    }
    shapes |= mlp_shapes(f"{moe}.shared_experts", hidden, width * config["num_shared_experts"])
    for expert in range(experts):
        for name, (out, into) in {"w1": (width, latent), "w2": (latent, width), "w3": (width, latent)}.items():
            shapes[f"{moe}.experts.{expert}.{name}.weight_packed"] = (out, into // 2)
            shapes[f"{moe}.experts.{expert}.{name}.weight_scale"] = (out, into // GROUP)
    return shapes


def check_weights(shapes: dict[str, Shape], weights: Weights) -> None:
    """ValueError unless the tensors are exactly those of the published form."""
    if shapes.keys() != weights.keys():
        missing, left = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
        raise ValueError(f"missing tensors: {missing[:5]}; tensors of no use: {left[:5]}")
    for name, shape in shapes.items():
        longer = name.endswith(".A_log") and weights[name].ndim == 1 and weights[name].shape >= shape
        if weights[name].shape != shape and not longer:
            raise ValueError(f"{name} has shape {weights[name].shape}, the configuration says {shape}")


# --- the equations ------------------------------------------------------------------------------------------


def decode_mxfp4(packed: NDArray[np.uint8], scale: NDArray[np.uint8], low_first: bool = True) -> Array:
    """Weights [out, in] from codes [out, in / 2] and scales [out, in / 32].

    A code is a sign, two bits of exponent (bias 1), one bit of mantissa. A scale is an exponent of two (bias 127).
    """
    halves = (packed & 15, packed >> 4) if low_first else (packed >> 4, packed & 15)
    codes = np.stack(halves, axis=-1).reshape(packed.shape[0], -1).astype(np.int64)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    magnitude = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent - 1))
    if (scale == 255).any():
        raise ValueError("a scale of 255 stands for no number")
    powers = np.exp2(scale.astype(np.float64) - 127)
    return np.asarray(np.where(sign == 1, -magnitude, magnitude) * np.repeat(powers, GROUP, axis=1))


def sigmoid(x: Array) -> Array:
    """The logistic function."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Over the last axis."""
    return np.asarray(weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """What stands in the place of silu(gate) * up: both halves are bounded."""
    return np.asarray(beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta))


def bounded_decay(raw: Array, slope: Array, bound: float) -> Array:
    """KDA's log decay, between `bound` and 0."""
    return bound * sigmoid(slope * raw)


def kda_step(state: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One token of the delta rule for all heads: the new state and the outputs.

    state [heads, key, value]; q, k and the log decay g [heads, key]; v [heads, value]; beta [heads].
    """
    state = np.exp(g)[:, :, None] * state
    seen = np.einsum("hkv,hk->hv", state, k)
    correction = beta[:, None] * (v - seen)
    state = state + k[:, :, None] * correction[:, None, :]
    return state, np.einsum("hkv,hk->hv", state, q)


def residual_weights(sources: Array, norm: Array, proj: Array, eps: float) -> Array:
    """The weights of AttnRes, one per source; sources [n, hidden], norm and proj [hidden]."""
    scores = sources @ (norm * proj) / np.sqrt(np.mean(sources * sources, axis=-1) + eps)
    return softmax(scores)


def attend(q: Array, rows: Array, k_up: Array, v_up: Array, scale: float) -> Array:
    """Absorbed MLA for one query: outputs [heads, value].

    q [heads, nope + rope], rows [tokens, latent + rope], k_up [heads, nope, latent], v_up [heads, value, latent].
    """
    nope, latent = k_up.shape[1:]
    absorbed = np.concatenate([np.einsum("hnc,hn->hc", k_up, q[:, :nope]), q[:, nope:]], axis=1)
    weights = softmax(absorbed @ rows.T * scale)
    return np.asarray(np.einsum("hvc,hc->hv", v_up, weights @ rows[:, :latent]))


def route(scores: Array, bias: Array, top: int, factor: float) -> Iterator[tuple[int, float]]:
    """The chosen experts and their weights, from router logits [experts]."""
    chances = sigmoid(scores)
    chosen = np.argsort(-(chances + bias), kind="stable")[:top]
    weights = chances[chosen] / (chances[chosen].sum() + 1e-20) * factor
    return zip(chosen.tolist(), weights.tolist(), strict=True)


# --- the model ----------------------------------------------------------------------------------------------


class Layer:
    """One layer's tensors and what it remembers of the tokens so far."""

    def __init__(self, config: dict[str, Any], weights: Weights, index: int, reading: Reading) -> None:
        start = f"model.layers.{index}."
        self.weights = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
        for name in [name for name in self.weights if name.endswith(".weight_packed")]:
            packed, scale = self.weights[name], self.weights[name.replace("_packed", "_scale")]
            self.weights[name.removesuffix("_packed")] = decode_mxfp4(packed, scale, reading.low_first)
        self.config, self.index, self.reading = config, index, reading
        self.eps: float = config["rms_norm_eps"]
        linear = config["linear_attn_config"]
        heads, size, kernel = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
        self.state = np.zeros((heads, size, size))
        self.recent = {name: [np.zeros(heads * size)] * (kernel - 1) for name in ("q", "k", "v")}
        self.rows: list[Array] = []

    def linear(self, name: str, x: Array) -> Array:
        """The projection of that name."""
        return np.asarray(self.weights[f"{name}.weight"] @ x)

    def norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        """The RMS norm of that name."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps if eps is None else eps)

    def mixer(self, x: Array) -> Array:
        """The layer's attention of the next token."""
        return self.kda(x) if is_kda(self.config, self.index) else self.mla(x)

    def convolve(self, name: str, x: Array) -> Array:
        """The projection `name`, then its short convolution over time and SiLU."""
        window = np.stack([*self.recent[name], self.linear(f"self_attn.{name}_proj", x)])
        self.recent[name] = list(window[1:])
        y = (window * self.weights[f"self_attn.{name}_conv1d.weight"][:, 0, :].T).sum(axis=0)
        return np.asarray(y * sigmoid(y))

    def kda(self, x: Array) -> Array:
        """Kimi delta attention with the bounded decay gate and the full-rank output gate."""
        heads, size = self.state.shape[:2]
        q, k, v = (self.convolve(name, x).reshape(heads, size) for name in ("q", "k", "v"))
        q, k = (a / np.sqrt((a * a).sum(axis=1, keepdims=True) + 1e-6) for a in (q, k))
        low_rank = self.linear("self_attn.f_b_proj", self.linear("self_attn.f_a_proj", x))
        raw = (low_rank + self.weights["self_attn.dt_bias"]).reshape(heads, size)
        a = np.exp(self.weights["self_attn.A_log"])
        slope = a[:heads, None] if self.reading.a_log == "head" else a[None, :size]
        g = bounded_decay(raw, slope, self.config["linear_attn_config"]["gate_lower_bound"])
        beta = sigmoid(self.linear("self_attn.b_proj", x))
        self.state, o = kda_step(self.state, q / math.sqrt(size), k, v, g, beta)
        gated = self.norm("self_attn.o_norm", o).ravel() * sigmoid(self.linear("self_attn.g_proj", x))
        return self.linear("self_attn.o_proj", gated)

    def mla(self, x: Array) -> Array:
        """Multi-head latent attention without positions, in its absorbed form, with an output gate."""
        heads, latent = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        nope, rope = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        eps = self.reading.latent_eps
        compressed = self.norm("self_attn.q_a_layernorm", self.linear("self_attn.q_a_proj", x), eps)
        q = self.linear("self_attn.q_b_proj", compressed).reshape(heads, nope + rope)
        row = self.linear("self_attn.kv_a_proj_with_mqa", x)
        self.rows.append(np.concatenate([self.norm("self_attn.kv_a_layernorm", row[:latent], eps), row[latent:]]))
        up = self.weights["self_attn.kv_b_proj.weight"].reshape(heads, -1, latent)
        o = attend(q, np.stack(self.rows), up[:, :nope], up[:, nope:], (nope + rope) ** -0.5)
        return self.linear("self_attn.o_proj", o.ravel() * sigmoid(self.linear("self_attn.g_proj", x)))

    def feed_forward(self, x: Array) -> Array:
        """The dense MLP of the first layers, the mixture of experts of all others."""
        if self.index < self.config["first_k_dense_replace"]:
            return self.mlp("mlp", x, ("gate_proj", "up_proj", "down_proj"))
        moe = "block_sparse_moe"
        scores, bias = self.linear(f"{moe}.gate", x), self.weights[f"{moe}.gate.e_score_correction_bias"]
        top, factor = self.config["num_experts_per_token"], self.config["routed_scaling_factor"]
        z = self.linear(f"{moe}.routed_expert_down_proj", x)
        routed = np.zeros_like(z)
        for expert, weight in route(scores, bias, top, factor):
            routed += weight * self.mlp(f"{moe}.experts.{expert}", z, ("w1", "w3", "w2"))
        routed = self.linear(f"{moe}.routed_expert_up_proj", self.norm(f"{moe}.routed_expert_norm", routed))
        return routed + self.mlp(f"{moe}.shared_experts", x, ("gate_proj", "up_proj", "down_proj"))

    def mlp(self, name: str, x: Array, names: tuple[str, str, str]) -> Array:
        """A gated MLP whose projections are called `names`: gate, up, down."""
        gate, up = (self.linear(f"{name}.{part}", x) for part in names[:2])
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return self.linear(f"{name}.{names[2]}", situ(gate, up, beta, linear_beta))


class Oracle:
    """The model of one folder at work on one sequence."""

    def __init__(self, folder: Path, reading: Reading) -> None:
        self.config = read_config(folder)
        self.weights = read_weights(folder)
        check_weights(published_shapes(self.config), self.weights)
        self.eps: float = self.config["rms_norm_eps"]
        layers = range(self.config["num_hidden_layers"])
        self.layers = [Layer(self.config, self.weights, index, reading) for index in layers]

    def mix(self, blocks: list[Array], total: Array, name: str) -> Array:
        """AttnRes over the blocks' inputs and the running sum; `name` is that of its norm and projection."""
        sources = np.stack([*blocks, total])
        norm, proj = self.weights[f"{name}_norm.weight"], self.weights[f"{name}_proj.weight"][0]
        return residual_weights(sources, norm, proj, self.eps) @ sources

    def step(self, token: int) -> tuple[Array, Array, Array]:
        """One more token: logits [vocab], and the two streams [layers + 1, hidden] of `Run`."""
        total = self.weights["model.embed_tokens.weight"][token]
        blocks: list[Array] = []
        sums, mixed = [], []
        for index, layer in enumerate(self.layers):
            name = f"model.layers.{index}"
            h = self.mix(blocks, total, f"{name}.self_attention_res")
            sums.append(total)
            mixed.append(h)
            y = layer.mixer(layer.norm("input_layernorm", h))
            if index % self.config["attn_res_block_size"] == 0:
                blocks.append(total)
                total = y
            else:
                total = total + y
            h = self.mix(blocks, total, f"{name}.mlp_res")
            total = total + layer.feed_forward(layer.norm("post_attention_layernorm", h))
        h = self.mix(blocks, total, "model.output_attn_res")
        sums.append(total)
        mixed.append(h)
        last = rms_norm(h, self.weights["model.norm.weight"], self.eps)
        return self.weights["lm_head.weight"] @ last, np.stack(sums), np.stack(mixed)
