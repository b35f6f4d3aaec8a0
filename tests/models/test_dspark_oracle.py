"""The judge of the DSpark drafter, checked without what it judges."""

from pathlib import Path

import numpy as np
import pytest
from tests.models import dspark_oracle as oracle
from tests.models import kimi_k3_oracle as target_oracle
from tests.models import random_checkpoints

TOKENS = [3, 14, 15, 9, 26, 5]
YARN = random_checkpoints.DSPARK_CONFIG["rope_parameters"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoints.k3(tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoints.dspark(tmp_path_factory.mktemp("dspark"))


class TestRope:
    def test_pairs_by_hand(self) -> None:
        config = {"rope_theta": 100.0}
        neighbours = oracle.Rope(config, 4, interleaved=True)
        np.testing.assert_allclose(neighbours.frequencies, [1.0, 0.1])
        x, position = np.array([1.0, 0.0, 0.0, 2.0]), 3
        # (1, 0) turned by 3 and (0, 2) by 0.3; real parts first.
        expected = [np.cos(3), -2 * np.sin(0.3), np.sin(3), 2 * np.cos(0.3)]
        np.testing.assert_allclose(neighbours.turn(x, position), expected)
        halves = oracle.Rope(config, 4, interleaved=False)
        np.testing.assert_allclose(halves.turn(x[[0, 2, 1, 3]], position), expected)

    @pytest.mark.parametrize("parameters", [None, YARN])
    def test_products_depend_on_the_distance_alone(self, parameters: dict[str, object] | None) -> None:
        rope = oracle.Rope({"rope_theta": 50000.0, "rope_parameters": parameters}, 8, interleaved=True)
        a, b = np.random.default_rng(0).standard_normal((2, 8))
        near, far = (rope.turn(a, start + 5) @ rope.turn(b, start) for start in (2, 900))
        assert near == pytest.approx(far)
        assert rope.turn(a, 0) @ rope.turn(b, 0) == pytest.approx(a @ b)
        assert near != pytest.approx(rope.turn(a, 8) @ rope.turn(b, 2))

    def test_yarn_slows_only_what_turns_slowly(self) -> None:
        rope = oracle.Rope({"rope_parameters": YARN}, 64, interleaved=True)
        plain = 50000.0 ** (-np.arange(32) / 32)
        ratio = plain / rope.frequencies
        # 32 turns in 32768 positions: pair 15.1; one turn: pair 25.3. The ramp is from 15 to 26.
        np.testing.assert_allclose(ratio[:16], 1.0)
        np.testing.assert_allclose(ratio[26:], 32.0)
        assert rope.frequencies[20] / plain[20] == pytest.approx(1 - 5 / 11 * 31 / 32)
        assert rope.amplitude == 1.0
        assert rope.scale_factor == pytest.approx(1.8133, abs=1e-4)


class TestBlock:
    def test_attention_is_plain_with_decompressed_keys_and_values(self, folder: Path) -> None:
        drafter = oracle.Drafter(folder, oracle.Reading())
        numbers = np.random.default_rng(1)
        context, x = numbers.standard_normal((5, 48)), numbers.standard_normal((4, 48))
        start = "layers.1.self_attn."
        w = {name.removeprefix(start): value for name, value in drafter.weights.items() if name.startswith(start)}
        everything = np.concatenate([context, x]) @ w["kv_a_proj_with_mqa.weight"].T
        both = target_oracle.rms_norm(everything[:, :16], w["kv_a_layernorm.weight"], 1e-5) @ w["kv_b_proj.weight"].T
        turned = np.stack([drafter.rope.turn(row, position) for position, row in enumerate(everything[:, 16:])])
        q = target_oracle.rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-5) @ w["q_b_proj.weight"].T
        q, both = q.reshape(4, 3, 16), both.reshape(9, 3, 14)
        outputs = []
        for head in range(3):
            queries = np.stack([drafter.rope.turn(q[place, head, 8:], 5 + place) for place in range(4)])
            scores = q[:, head, :8] @ both[:, head, :8].T + queries @ turned.T
            outputs.append(target_oracle.softmax(scores * 1.8132604 / 4) @ both[:, head, 8:])
        expected = np.concatenate(outputs, axis=1) @ w["o_proj.weight"].T
        np.testing.assert_allclose(drafter.attention("layers.1.self_attn", context, x), expected, rtol=1e-6)

    def test_layers_add_to_the_embeddings_of_anchor_and_mask(self, folder: Path) -> None:
        drafter = oracle.Drafter(folder, oracle.Reading())
        numbers = np.random.default_rng(2)
        streams, embeddings = numbers.standard_normal((5, 9, 48)), numbers.standard_normal((50, 48))
        w = drafter.weights
        h = embeddings[[11, 47, 47]]
        for layer in range(2):
            name = f"layers.{layer}"
            normed = target_oracle.rms_norm(h, w[f"{name}.input_layernorm.weight"], 1e-5)
            h = h + drafter.attention(f"{name}.self_attn", drafter.context(streams), normed)
            normed = target_oracle.rms_norm(h, w[f"{name}.post_attention_layernorm.weight"], 1e-5)
            gate, up = normed @ w[f"{name}.mlp.gate_proj.weight"].T, normed @ w[f"{name}.mlp.up_proj.weight"].T
            h = h + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        np.testing.assert_allclose(drafter.block(streams, embeddings, 11, 3), h)

    def test_the_block_sees_itself_whole_unless_causal(self, folder: Path, target: Path) -> None:
        def first(count: int, causal: bool) -> oracle.Array:
            return oracle.propose(
                folder, target, TOKENS, 11, count=count, reading=oracle.Reading(causal=causal)
            ).backbone[0]

        np.testing.assert_allclose(first(5, True), first(2, True))
        assert np.abs(first(5, False) - first(2, False)).max() > 1e-3

    def test_the_context_at_a_position_is_of_that_position(self, folder: Path, target: Path) -> None:
        drafter = oracle.Drafter(folder, oracle.Reading())
        streams = target_oracle.run(target, TOKENS).sums
        changed = streams.copy()
        changed[2] += 1.0
        moved = np.abs(drafter.context(changed) - drafter.context(streams)).max(axis=1)
        assert list(moved > 0) == [False, False, True, False, False, False]
        unread = streams.copy()
        unread[:, [0, 1, 3, 4, 6, 8]] += 1.0  # outputs of layers 1, 4 and 6 are entries 2, 5 and 7
        np.testing.assert_array_equal(drafter.context(unread), drafter.context(streams))

    def test_every_switch_counts(self, folder: Path, target: Path) -> None:
        def backbone(reading: oracle.Reading) -> oracle.Array:
            return oracle.propose(folder, target, TOKENS, 11, count=4, reading=reading).backbone

        plain = backbone(oracle.Reading())
        np.testing.assert_array_equal(backbone(oracle.Reading(stream="sum")), plain)
        others = [oracle.Reading(stream="mixed"), oracle.Reading(interleaved=False), oracle.Reading(latent_eps=1e-6)]
        for reading in others:
            assert np.abs(backbone(reading) - plain).max() > 1e-7, reading


class TestHeads:
    def test_the_markov_head_reads_the_token_before(self, folder: Path, target: Path) -> None:
        draft = oracle.propose(folder, target, TOKENS, 11, count=3, chosen=[4, 8, 15])
        w = oracle.read_weights(folder)
        for place, before in enumerate([11, 4, 8]):
            bias = w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
            np.testing.assert_allclose(draft.logits[place] - draft.backbone[place], bias)
        assert draft.tokens == [4, 8, 15]

    def test_greedy_drafts_follow_their_own_logits(self, folder: Path, target: Path) -> None:
        draft = oracle.propose(folder, target, TOKENS, 11)
        assert draft.tokens == draft.logits.argmax(axis=1).tolist()
        again = oracle.propose(folder, target, TOKENS, 11, chosen=draft.tokens)
        np.testing.assert_array_equal(again.logits, draft.logits)

    @pytest.mark.parametrize("normed", [True, False])
    def test_confidence(self, folder: Path, target: Path, normed: bool) -> None:
        reading = oracle.Reading(confidence_normed=normed)
        draft = oracle.propose(folder, target, TOKENS, 11, count=2, chosen=[4, 8], reading=reading)
        w = oracle.read_weights(folder)
        h = target_oracle.rms_norm(draft.hidden, w["final_norm.weight"], 1e-5) if normed else draft.hidden
        for place, before in enumerate([11, 4]):
            read = np.concatenate([h[place], w["markov_head.markov_w1.weight"][before]])
            score = read @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0]
            assert draft.confidence[place] == pytest.approx(1 / (1 + np.exp(-score)))


class TestFolder:
    def test_the_configuration_chooses_stream_and_gate(self, tmp_path: Path) -> None:
        random_checkpoints.dspark(tmp_path, {"aux_hidden_stream": "attn_res", "mla_use_output_gate": True})
        drafter = oracle.Drafter(tmp_path, oracle.Reading())
        assert drafter.stream == "mixed"
        x = np.random.default_rng(2).standard_normal((3, 48))
        gated = drafter.attention("layers.0.self_attn", x, x)
        drafter.weights["layers.0.self_attn.g_proj.weight"] *= 0
        halved = drafter.attention("layers.0.self_attn", x, x)
        assert np.abs(gated - halved).max() > 1e-3
        drafter.config["mla_use_output_gate"] = False
        np.testing.assert_allclose(drafter.attention("layers.0.self_attn", x, x), 2 * halved)

    @pytest.mark.parametrize("change", [{"fc_norm": True}, {"markov_head_type": "gated"}, {"q_lora_rank": None}])
    def test_another_drafter_is_refused(self, tmp_path: Path, change: dict[str, object]) -> None:
        random_checkpoints.write(tmp_path, random_checkpoints.DSPARK_CONFIG | change, {})
        with pytest.raises(ValueError, match="another drafter"):
            oracle.Drafter(tmp_path, oracle.Reading())

    def test_names_of_another_export(self, tmp_path: Path, folder: Path) -> None:
        config = random_checkpoints.DSPARK_CONFIG
        other = {name: exported for exported, name in oracle.OTHER_NAMES.items()}
        tensors = random_checkpoints.random_tensors(oracle.published_shapes(config), seed=8)
        random_checkpoints.write(tmp_path, config, {other.get(name, name): value for name, value in tensors.items()})
        ours, theirs = oracle.read_weights(folder), oracle.Drafter(tmp_path, oracle.Reading()).weights
        assert ours.keys() == theirs.keys()
        np.testing.assert_array_equal(ours["context_proj.weight"], theirs["context_proj.weight"])
