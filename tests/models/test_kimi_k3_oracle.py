"""The judge of Kimi-K3, checked without what it judges: by hand, against other forms of an equation, by its laws."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import kimi_k3_oracle as oracle
from tests.models import random_checkpoints

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoints.k3(tmp_path_factory.mktemp("k3"))


def tensors_of(folder: Path) -> oracle.Weights:
    return oracle.read_weights(folder)


def layer_of(folder: Path, index: int) -> oracle.Layer:
    return oracle.Layer(oracle.read_config(folder), tensors_of(folder), index, oracle.Reading())


class TestEquations:
    def test_all_codes_of_mxfp4(self) -> None:
        packed = np.array([[16 * (2 * i + 1) + 2 * i for i in range(8)] * 2] * 2, np.uint8)  # codes 0 to 15, twice
        values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        values += [-value for value in values]
        decoded = oracle.decode_mxfp4(packed, np.array([[127], [125]], np.uint8))
        np.testing.assert_array_equal(decoded[0], values * 2)
        np.testing.assert_array_equal(decoded[1], np.array(values * 2) / 4)

    def test_scales_are_of_32_inputs_and_the_low_half_comes_first(self) -> None:
        packed = np.full((1, 32), 0x52, np.uint8)  # codes 2 and 5: 1 and 3
        scale = np.array([[127, 130]], np.uint8)
        expected = np.array([1.0, 3.0] * 16 + [8.0, 24.0] * 16)
        np.testing.assert_array_equal(oracle.decode_mxfp4(packed, scale)[0], expected)
        swapped = oracle.decode_mxfp4(packed, scale, low_first=False)[0]
        np.testing.assert_array_equal(swapped, expected.reshape(-1, 2)[:, ::-1].ravel())

    def test_a_scale_that_is_no_number(self) -> None:
        with pytest.raises(ValueError, match="255"):
            oracle.decode_mxfp4(np.zeros((1, 16), np.uint8), np.array([[255]], np.uint8))

    def test_two_tokens_of_kda_by_hand(self) -> None:
        def step(state: oracle.Array, k: list[float], v: float, decay: list[float], beta: float) -> oracle.Array:
            arrays = (np.array([[1.0, 1.0]]), np.array([k]), np.array([[v]]), np.log([decay]), np.array([beta]))
            new, output = oracle.kda_step(state, *arrays)
            outputs.append(output[0, 0])
            return new

        outputs: list[float] = []
        # Nothing stored: u = 0.5 * 3, S = (1.5, 0).
        state = step(np.zeros((1, 2, 1)), [1.0, 0.0], 3.0, [0.5, 1.0], 0.5)
        # Decayed first, per channel of the key: (0.75, 0). Seen along k: 0.45. u = 0.55, S = (1.08, 0.44).
        state = step(state, [0.6, 0.8], 1.0, [0.5, 0.25], 1.0)
        np.testing.assert_allclose(state[0, :, 0], [1.08, 0.44])
        np.testing.assert_allclose(outputs, [1.5, 1.52])

    def test_a_key_written_fully_is_read_back(self) -> None:
        numbers = np.random.default_rng(0)
        keys, values = np.linalg.qr(numbers.standard_normal((4, 4)))[0], numbers.standard_normal((4, 3))
        state = np.zeros((1, 4, 3))
        for key, value in zip(keys, values, strict=True):
            state, output = oracle.kda_step(state, key[None], key[None], value[None], np.zeros((1, 4)), np.ones(1))
            np.testing.assert_allclose(output[0], value)
        np.testing.assert_allclose(keys @ state[0], values)

    def test_the_decay_is_bounded(self) -> None:
        slope = np.array([[1.0], [2.0]])
        raw = np.array([[0.0, 1e9, -1e9], [0.0, np.log(3) / 2, -np.log(3) / 2]])
        expected = [[-2.5, -5.0, 0.0], [-2.5, -3.75, -1.25]]
        np.testing.assert_allclose(oracle.bounded_decay(raw, slope, -5.0), expected, atol=1e-12)

    def test_situ_by_hand(self) -> None:
        gate, up = np.array([1e3, -1e3, 0.01, 4.0]), np.array([1e4, 5.0, 0.2, -25.0])
        silu = 0.01 / (1 + np.exp(-0.01))
        four = 4 * np.tanh(1.0) / (1 + np.exp(-4.0)) * -25 * np.tanh(1.0)
        np.testing.assert_allclose(oracle.situ(gate, up, 4.0, 25.0), [100.0, 0.0, silu * 0.2, four], rtol=1e-4)

    def test_the_bias_chooses_but_does_not_weigh(self) -> None:
        scores = np.array([0.0, np.log(3), -np.log(3)])  # chances 0.5, 0.75, 0.25
        chosen = dict(oracle.route(scores, np.array([0.0, -0.5, 1.0]), 2, 2.0))
        assert chosen == {2: pytest.approx(2 / 3), 0: pytest.approx(4 / 3)}

    def test_weights_of_attn_res(self) -> None:
        numbers = np.random.default_rng(1)
        sources, norm, proj = numbers.standard_normal((5, 8)), numbers.standard_normal(8), numbers.standard_normal(8)
        weights = oracle.residual_weights(sources, norm, proj, 1e-5)
        assert weights.sum() == pytest.approx(1.0, abs=1e-15)
        scores = [oracle.rms_norm(source, norm, 1e-5) @ proj for source in sources]
        np.testing.assert_allclose(np.log(weights / weights[0]), np.array(scores) - scores[0], atol=1e-12)
        assert oracle.residual_weights(sources[:1], norm, proj, 1e-5) == pytest.approx([1.0])
        np.testing.assert_allclose(oracle.residual_weights(sources[[0, 0, 0]], norm, proj, 1e-5), 1 / 3)


class TestLayers:
    def test_the_convolution_reads_three_tokens_back(self, folder: Path) -> None:
        layer = layer_of(folder, 0)
        layer.weights["self_attn.q_conv1d.weight"] = np.zeros((24, 1, 4))
        layer.weights["self_attn.q_conv1d.weight"][:12, 0, 3] = 1.0  # the token itself
        layer.weights["self_attn.q_conv1d.weight"][12:, 0, 0] = 1.0
        inputs = np.random.default_rng(2).standard_normal((6, 48))
        outputs = np.stack([layer.convolve("q", x) for x in inputs])
        plain = inputs @ layer.weights["self_attn.q_proj.weight"].T
        expected = np.concatenate([plain[:, :12], np.concatenate([np.zeros((3, 12)), plain[:3, 12:]])], axis=1)
        np.testing.assert_allclose(outputs, expected / (1 + np.exp(-expected)))

    def test_kda_is_its_form_for_whole_chunks(self, folder: Path) -> None:
        layer = layer_of(folder, 1)
        x = np.random.default_rng(6).standard_normal((9, 48))
        w = {name.removeprefix("self_attn."): value for name, value in layer.weights.items()}

        def convolved(name: str) -> oracle.Array:
            padded = np.concatenate([np.zeros((3, 24)), x @ w[f"{name}_proj.weight"].T])
            y = sum(padded[j : j + 9] * w[f"{name}_conv1d.weight"][:, 0, j] for j in range(4))
            return (y / (1 + np.exp(-y))).reshape(9, 3, 8)

        q, k, v = (convolved(name) for name in "qkv")
        q, k = (a / np.sqrt((a**2).sum(axis=-1, keepdims=True) + 1e-6) for a in (q, k))
        raw = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).reshape(9, 3, 8)
        decays = -5 / (1 + np.exp(-np.exp(w["A_log"][:3, None]) * raw))
        beta = 1 / (1 + np.exp(-x @ w["b_proj.weight"].T))
        outputs = []
        for head in range(3):
            total = np.cumsum(decays[:, head], axis=0)
            between = np.exp(total[:, None] - total[None, :])  # decay from token j to token i, for j <= i
            keys = np.einsum("ic,jc,ijc->ij", k[:, head], k[:, head], between)
            system = np.eye(9) + beta[:, head, None] * np.tril(keys, -1)
            corrections = np.linalg.solve(system, beta[:, head, None] * v[:, head])
            reads = np.einsum("ic,jc,ijc->ij", q[:, head] / np.sqrt(8), k[:, head], between)
            outputs.append(np.tril(reads) @ corrections)
        o = oracle.rms_norm(np.stack(outputs, axis=1), w["o_norm.weight"], 1e-5).reshape(9, 24)
        expected = o / (1 + np.exp(-x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T
        np.testing.assert_allclose(np.stack([layer.kda(row) for row in x]), expected)

    def test_mla_is_plain_attention_with_decompressed_keys_and_values(self, folder: Path) -> None:
        layer = layer_of(folder, 3)
        x = np.random.default_rng(3).standard_normal((7, 48))
        w = {name.removeprefix("self_attn."): value for name, value in layer.weights.items()}
        q = oracle.rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
        row = x @ w["kv_a_proj_with_mqa.weight"].T
        both = oracle.rms_norm(row[:, :16], w["kv_a_layernorm.weight"], 1e-6) @ w["kv_b_proj.weight"].T
        q, both = q.reshape(7, 2, 12), both.reshape(7, 2, 14)
        outputs = []
        for head in range(2):
            keys = np.concatenate([both[:, head, :8], row[:, 16:]], axis=1)
            scores = q[:, head] @ keys.T / np.sqrt(12)
            scores[np.triu_indices(7, 1)] = -np.inf
            outputs.append(oracle.softmax(scores) @ both[:, head, 8:])
        gated = np.concatenate(outputs, axis=1) / (1 + np.exp(-x @ w["g_proj.weight"].T))
        np.testing.assert_allclose(np.stack([layer.mla(row) for row in x]), gated @ w["o_proj.weight"].T)

    def test_only_the_first_entries_of_a_log_count(self, folder: Path) -> None:
        def last(entry: int | None) -> oracle.Array:
            layer = layer_of(folder, 1)
            if entry is not None:
                layer.weights["self_attn.A_log"][entry] += 1.0
            return [layer.kda(x) for x in inputs][-1]

        inputs = np.random.default_rng(4).standard_normal((5, 48))
        np.testing.assert_array_equal(last(3), last(None))
        assert np.abs(last(2) - last(None)).max() > 1e-4

    def test_routed_experts_work_in_the_latent_space(self, folder: Path) -> None:
        layer = layer_of(folder, 2)
        moe = "block_sparse_moe"
        x = np.random.default_rng(5).standard_normal(48)
        for expert in range(8):  # all experts alike: the choice cannot matter
            for name in ("w1", "w2", "w3"):
                layer.weights[f"{moe}.experts.{expert}.{name}.weight"] = layer.weights[f"{moe}.experts.0.{name}.weight"]
        z = layer.linear(f"{moe}.routed_expert_down_proj", x)
        one = layer.mlp(f"{moe}.experts.0", z, ("w1", "w3", "w2"))
        routed = layer.linear(f"{moe}.routed_expert_up_proj", layer.norm(f"{moe}.routed_expert_norm", one))
        shared = layer.mlp(f"{moe}.shared_experts", x, ("gate_proj", "up_proj", "down_proj"))
        np.testing.assert_allclose(layer.feed_forward(x), routed + shared)


class TestModel:
    def test_shapes_and_first_streams(self, folder: Path) -> None:
        run = oracle.run(folder, TOKENS)
        assert run.logits.shape == (10, 50)
        assert run.logits.dtype == np.float64
        assert run.sums.shape == run.mixed.shape == (10, 9, 48)
        assert np.isfinite(run.logits).all()
        embedded = tensors_of(folder)["model.embed_tokens.weight"][TOKENS]
        np.testing.assert_array_equal(run.sums[:, 0], embedded)
        np.testing.assert_allclose(run.mixed[:, 0], embedded)  # no block yet
        np.testing.assert_array_equal(oracle.logits(folder, TOKENS), run.logits)

    def test_a_later_token_changes_no_earlier_logit_and_an_early_one_all_later(self, folder: Path) -> None:
        plain = oracle.logits(folder, TOKENS)
        np.testing.assert_array_equal(oracle.logits(folder, [*TOKENS[:9], 44])[:9], plain[:9])
        moved = np.abs(oracle.logits(folder, [44, *TOKENS[1:]]) - plain).max(axis=1)
        assert (moved > 1e-3).all()

    def test_a_block_begins_with_a_new_sum_and_keeps_its_input(self, tmp_path: Path, folder: Path) -> None:
        silent = {}
        for name, shape in oracle.published_shapes(random_checkpoints.K3_CONFIG).items():
            if name.endswith(("self_attn.o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")):
                silent[name] = torch.zeros(shape)
        run = oracle.run(random_checkpoints.k3(tmp_path, **silent), TOKENS)
        np.testing.assert_array_equal(run.sums[:, 1:], np.zeros((10, 8, 48)))  # no layer adds anything
        # The embedding is left as a block's input, weighed against sums of zero: one after layer 0, two after layer 3.
        w = tensors_of(tmp_path)
        embedded = w["model.embed_tokens.weight"][TOKENS[4]]
        for layer, zeros in ((1, 1), (3, 1), (4, 2), (6, 2), (7, 3)):
            name = f"model.layers.{layer}.self_attention_res"
            score = oracle.rms_norm(embedded, w[f"{name}_norm.weight"], 1e-5) @ w[f"{name}_proj.weight"][0]
            expected = embedded * np.exp(score) / (np.exp(score) + zeros)
            np.testing.assert_allclose(run.mixed[4, layer], expected)

    def test_sources_of_attn_res(self, folder: Path) -> None:
        class Counting(oracle.Oracle):
            def mix(self, blocks: list[oracle.Array], total: oracle.Array, name: str) -> oracle.Array:
                counts[name.removeprefix("model.")] = len(blocks)
                return super().mix(blocks, total, name)

        counts: dict[str, int] = {}
        Counting(folder, oracle.Reading()).step(3)
        attention = [counts.pop(f"layers.{layer}.self_attention_res") for layer in range(8)]
        mlp = [counts.pop(f"layers.{layer}.mlp_res") for layer in range(8)]
        assert attention == [0, 1, 1, 1, 2, 2, 2, 3]
        assert mlp == [1, 1, 1, 2, 2, 2, 3, 3]  # a block's input counts at once
        assert counts == {"output_attn_res": 3}

    @pytest.mark.parametrize(
        "reading",
        [oracle.Reading(latent_eps=None), oracle.Reading(a_log="channel"), oracle.Reading(low_first=False)],
    )
    def test_every_switch_counts(self, folder: Path, reading: oracle.Reading) -> None:
        assert np.abs(oracle.logits(folder, TOKENS, reading) - oracle.logits(folder, TOKENS)).max() > 1e-7


class TestFolder:
    def test_what_is_missing_or_left_is_named(self, tmp_path: Path) -> None:
        random_checkpoints.k3(tmp_path, **{"model.layers.9.mlp.weight": torch.ones(1)})
        with pytest.raises(ValueError, match=r"of no use: .*layers\.9\.mlp"):
            oracle.logits(tmp_path, TOKENS)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match="missing tensors"):
            oracle.logits(tmp_path, TOKENS)

    def test_another_shape_is_refused(self, tmp_path: Path) -> None:
        random_checkpoints.k3(tmp_path, **{"model.norm.weight": torch.ones(49)})
        with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(49,\)"):
            oracle.logits(tmp_path, TOKENS)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_float_types(self, tmp_path: Path, dtype: torch.dtype) -> None:
        values = torch.tensor([[1.0, -0.15625], [3e-5, 240.0]]).to(dtype)
        random_checkpoints.write(tmp_path, {}, {"a": values, "b": torch.tensor([7], dtype=torch.uint8)})
        read = oracle.read_safetensors(tmp_path / "model-00001-of-00002.safetensors")["a"]
        np.testing.assert_array_equal(read, values.double().numpy())
