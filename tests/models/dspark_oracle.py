"""The DSpark drafter of Kimi-K3 in its MLA form a second time: numpy, float64, written from the equations alone.

Its target is `kimi_k3_oracle`. Only the names of tensors and of configuration fields, and the shapes of tensors, are
taken from published drafters.

What the equations leave open, or what rests on one reading of one source, and what is done here:

Read with a switch (`Reading`):
 1. The target's stream: the running sum after a layer (`aux_hidden_stream` "prefix" or absent), or what the next
    layer's attention mixes from it ("attn_res"). `stream` overrides the configuration.
 2. RoPE turns neighbouring pairs (2i, 2i + 1); `interleaved=False` turns (i, i + half). The published configuration
    says neither; engines that read it turn neighbours.
 3. The block sees itself whole. In one preview a place sees no later one (`causal=True`).
 4. The epsilon of MLA's two latent norms: `rms_norm_eps` (`latent_eps=1e-6` for the other).
 5. The confidence head reads the output after the last norm, as `lm_head` does (`confidence_normed=False`: before it).

Read in one way only:
 6. A layer is the usual one: h += attention(norm(h)), h += mlp(norm(h)), with silu(gate) * up; one norm stands before
    `lm_head`. The equations say only that there are layers.
 7. Entries of the context come from H_ctx itself, without the layer's `input_layernorm`; entries of the block, made
    with the same weights, come from its normed input.
 8. MLA has a query latent, and an output gate only if `mla_use_output_gate` says so.
 9. The scale is (nope + rope)^-1/2. YaRN (`rope_parameters`) is that of its paper: the ramp's ends are rounded outward
    to whole dimensions, cos and sin are multiplied by m(mscale) / m(mscale_all_dim), and the scale by
    m(mscale_all_dim)^2, with m(x) = 0.1 x ln(factor) + 1. The equations say only that there is RoPE.
10. Embeddings of anchor and mask are the target's, as they are (no scale, no norm).
11. Only the plain Markov head ("vanilla") is read. A published drafter norms each layer's feature before
    `context_proj` (`fc_norm`); no source here names the tensors of those norms, so it is refused.
12. The number of proposals is an argument: the published configuration has no field for it (7 is said in prose).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tests.models import kimi_k3_oracle
from tests.models.kimi_k3_oracle import Array, Shape, Weights, attend, rms_norm, sigmoid

# Names in exports for one engine, and those of the published MLA drafters that are used here.
OTHER_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


@dataclass(frozen=True)
class Reading:
    """Which of two plausible readings is taken; the numbers are those of the list above."""

    stream: Literal["sum", "mixed"] | None = None  # 1; None: as the configuration says
    interleaved: bool = True  # 2
    causal: bool = False  # 3
    latent_eps: float | None = None  # 4; None: rms_norm_eps
    confidence_normed: bool = True  # 5


@dataclass(frozen=True)
class Proposal:
    """A draft of `n` tokens.

    `hidden` [n, hidden] is the output before the last norm, `backbone` [n, vocab] the logits without the Markov head,
    `logits` [n, vocab] those with it (the distribution of the draft), `confidence` [n] the chance that a token is
    accepted if those before it are. Each place's `logits` and `confidence` rest on the one of `tokens` before it.
    """

    tokens: list[int]
    hidden: Array
    backbone: Array
    logits: Array
    confidence: Array


def propose(
    folder: Path,
    target: Path,
    tokens: Sequence[int],
    anchor: int,
    *,
    count: int = 7,
    chosen: Sequence[int] | None = None,
    reading: Reading | None = None,
    target_reading: kimi_k3_oracle.Reading | None = None,
) -> Proposal:
    """A draft after `tokens` (verified: the target has computed them) and `anchor` (the next token, not yet computed).

    `chosen` are the drawn tokens; without them each place takes its likeliest token.
    """
    run = kimi_k3_oracle.run(target, tokens, target_reading)
    drafter = Drafter(folder, reading or Reading())
    streams = run.sums if drafter.stream == "sum" else run.mixed
    shared = kimi_k3_oracle.read_weights(target)
    hidden = drafter.block(streams, shared["model.embed_tokens.weight"], anchor, count)
    normed = drafter.norm("final_norm", hidden)
    backbone = normed @ shared["lm_head.weight"].T
    places, confidence, drawn = [], [], [anchor]
    for place in range(count):
        scores, chance = drafter.heads(backbone[place], normed[place], hidden[place], drawn[-1])
        places.append(scores)
        confidence.append(chance)
        drawn.append(int(np.argmax(scores)) if chosen is None else chosen[place])
    return Proposal(drawn[1:], hidden, backbone, np.stack(places), np.array(confidence))


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`; ValueError if it asks for what the equations here are not of."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    wanted = {
        "mla_use_nope": False,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "fc_norm": False,
        "hidden_act": "silu",
    }
    different = {name: config[name] for name, value in wanted.items() if config.get(name, value) != value}
    if different or not config.get("q_lora_rank"):
        raise ValueError(f"these equations are of another drafter: {different or 'no q_lora_rank'}")
    return config


def published_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of every tensor of a drafter in MLA form."""
    hidden, features = config["hidden_size"], len(config["target_layer_ids"]) * config["target_hidden_size"]
    rank, vocab = config["markov_rank"], config["vocab_size"]
    shapes: dict[str, Shape] = {
        "context_proj.weight": (hidden, features),
        "context_norm.weight": (hidden,),
        "final_norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    of_layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    of_layer |= kimi_k3_oracle.mla_shapes(config, gated=config.get("mla_use_output_gate", False))
    of_layer |= kimi_k3_oracle.mlp_shapes("mlp", hidden, config["intermediate_size"])
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def read_weights(folder: Path) -> Weights:
    """The drafter's tensors under the names of `published_shapes`."""
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, values in kimi_k3_oracle.read_safetensors(file).items():
            weights[OTHER_NAMES.get(name, name)] = values
    return weights


class Rope:
    """Rotary positions, plain or with YaRN, of `size` dimensions."""

    def __init__(self, config: dict[str, Any], size: int, interleaved: bool) -> None:
        parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta"), "rope_type": "default"}
        parameters |= config.get("rope_parameters") or {}
        theta, kind = parameters["rope_theta"], parameters["rope_type"]
        if kind not in ("default", "yarn"):
            raise ValueError(f"rope_type {kind!r}: neither default nor yarn")
        self.interleaved = interleaved
        self.frequencies: Array = theta ** (-np.arange(0, size, 2) / size)
        self.amplitude = self.scale_factor = 1.0
        if kind == "yarn":
            self._stretch(parameters, size, theta)

    def _stretch(self, parameters: dict[str, Any], size: int, theta: float) -> None:
        """YaRN: slow frequencies are divided by the factor, fast ones kept, those between mixed along a ramp."""
        factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            """The pair that turns so often within the original length."""
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dimension(parameters["beta_fast"])), 0)
        high = min(math.ceil(dimension(parameters["beta_slow"])), size - 1)
        slow = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
        self.frequencies = self.frequencies * (1 - slow) + self.frequencies / factor * slow

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

        self.amplitude = magnitude(parameters.get("mscale", 1)) / magnitude(parameters.get("mscale_all_dim", 0))
        self.scale_factor = magnitude(parameters.get("mscale_all_dim", 0)) ** 2

    def turn(self, x: Array, position: int) -> Array:
        """x [..., size] at a position; the order of dimensions within a vector is the rope's own."""
        pairs = x.reshape(*x.shape[:-1], -1, 2) if self.interleaved else np.stack(np.split(x, 2, axis=-1), axis=-1)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * position * self.frequencies) * self.amplitude
        return np.concatenate([turned.real, turned.imag], axis=-1)


class Drafter:
    """The drafter of one folder."""

    def __init__(self, folder: Path, reading: Reading) -> None:
        self.config = read_config(folder)
        self.weights = read_weights(folder)
        kimi_k3_oracle.check_weights(published_shapes(self.config), self.weights)
        self.reading = reading
        said = {"prefix": "sum", "attn_res": "mixed"}[self.config.get("aux_hidden_stream", "prefix")]
        self.stream = reading.stream or said
        self.rope = Rope(self.config, self.config["qk_rope_head_dim"], reading.interleaved)

    def linear(self, name: str, x: Array) -> Array:
        """The projection of that name; x [..., in]."""
        return np.asarray(x @ self.weights[f"{name}.weight"].T)

    def norm(self, name: str, x: Array, eps: float | None = None) -> Array:
        """The RMS norm of that name."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"] if eps is None else eps)

    def context(self, streams: Array) -> Array:
        """H_ctx [tokens, hidden] from the target's stream [tokens, layers + 1, hidden]; layer -1 is the embedding."""
        layers = [layer + 1 for layer in self.config["target_layer_ids"]]
        return self.norm("context_norm", self.linear("context_proj", streams[:, layers].reshape(len(streams), -1)))

    def block(self, streams: Array, embeddings: Array, anchor: int, count: int) -> Array:
        """The output [count, hidden] of the parallel pass over [anchor, mask, ...], before the last norm."""
        context = self.context(streams)
        h = embeddings[[anchor] + [self.config["mask_token_id"]] * (count - 1)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            h = h + self.attention(f"{name}.self_attn", context, self.norm(f"{name}.input_layernorm", h))
            x = self.norm(f"{name}.post_attention_layernorm", h)
            gate, up = (self.linear(f"{name}.mlp.{part}_proj", x) for part in ("gate", "up"))
            h = h + self.linear(f"{name}.mlp.down_proj", gate * sigmoid(gate) * up)
        return h

    def entry(self, name: str, x: Array, position: int) -> Array:
        """What the cache holds of one token: the latent, then the turned part."""
        latent = self.config["kv_lora_rank"]
        row = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        compressed = self.norm(f"{name}.kv_a_layernorm", row[:latent], self.reading.latent_eps)
        return np.concatenate([compressed, self.rope.turn(row[latent:], position)])

    def attention(self, name: str, context: Array, x: Array) -> Array:
        """Each place of the block [count, hidden] sees the whole context and, unless causal, the whole block."""
        heads, latent = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        nope, rope = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        start = len(context)
        rows = np.stack([self.entry(name, row, position) for position, row in enumerate([*context, *x])])
        up = self.weights[f"{name}.kv_b_proj.weight"].reshape(heads, -1, latent)
        scale = (nope + rope) ** -0.5 * self.rope.scale_factor
        outputs = []
        for place, row in enumerate(x):
            low_rank = self.linear(f"{name}.q_a_proj", row)
            compressed = self.norm(f"{name}.q_a_layernorm", low_rank, self.reading.latent_eps)
            q = self.linear(f"{name}.q_b_proj", compressed).reshape(heads, nope + rope)
            q = np.concatenate([q[:, :nope], self.rope.turn(q[:, nope:], start + place)], axis=1)
            seen = rows[: start + place + 1] if self.reading.causal else rows
            outputs.append(attend(q, seen, up[:, :nope], up[:, nope:], scale).ravel())
        o = np.stack(outputs)
        if self.config.get("mla_use_output_gate", False):
            o = o * sigmoid(self.linear(f"{name}.g_proj", x))
        return self.linear(f"{name}.o_proj", o)

    def heads(self, backbone: Array, normed: Array, hidden: Array, before: int) -> tuple[Array, float]:
        """Corrected logits [vocab] and the confidence of one place, given the token before it."""
        markov = self.weights["markov_head.markov_w1.weight"][before]
        logits = backbone + self.linear("markov_head.markov_w2", markov)
        read = np.concatenate([normed if self.reading.confidence_normed else hidden, markov])
        score = self.linear("confidence_head.proj", read) + self.weights["confidence_head.proj.bias"]
        return logits, float(sigmoid(score)[0])
