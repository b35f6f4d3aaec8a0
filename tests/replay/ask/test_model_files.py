"""A model read from its own files has the sizes that its config implies."""

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cache import FullAttention, ParallelLayout, Recurrent
from headway.cli import main
from headway.errors import ConfigError, ModelError
from headway.replay.ask.model_files import is_model_files, model_of_files
from headway.replay.ask.options import ModelChoice, RankChoice
from headway.replay.ask.sizing import sized_model

pytest.importorskip("torch")

# Two layers of Gated DeltaNet and one of attention: 2 key/value heads of 16; 4 value heads and 2 key heads of 8.
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2],
    "vocab_size": 64,
}
ATTENTION = 2 * 2 * 16  # numbers of a token: keys and values of 2 heads
STATE = 2 * 4 * 8 * 8  # numbers of two layers: 4 heads of 8 x 8
CONVOLUTION = 2 * (2 * 2 * 8 + 4 * 8) * 4  # two layers: queries, keys and values of 4 steps


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "toy" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


def sizes(path: Path, layout: ParallelLayout | None = None, **dtypes: str) -> tuple[int, int]:
    model = model_of_files(path, layout or ParallelLayout(), **({"kv_dtype": "bf16", "state_dtype": "fp32"} | dtypes))
    attention, state = model.groups
    assert isinstance(attention, FullAttention)
    assert isinstance(state, Recurrent)
    return attention.bytes_per_token, state.state_bytes


def test_sizes_follow_from_the_config_and_the_data_types(config: Path) -> None:
    assert sizes(config) == (2 * ATTENTION, 4 * STATE + 2 * CONVOLUTION)
    assert sizes(config.parent) == sizes(config)
    assert sizes(config, kv_dtype="fp8", state_dtype="bf16") == (ATTENTION, 2 * STATE + 2 * CONVOLUTION)
    assert sizes(config, ParallelLayout(tp=2)) == (ATTENTION, 2 * STATE + CONVOLUTION)


def test_a_model_by_its_files_is_a_model_like_any_other(config: Path) -> None:
    model = sized_model(ModelChoice(str(config)), RankChoice())
    assert model.name == "toy"
    assert model.parameters > 0
    assert model.layers == {"full": 1, "state": 2}
    assert model.cost.linear > 0
    assert model.cost.quadratic == 2.0 * 4 * (16 + 16), "one layer of 4 query heads over keys and values of 16"


def test_a_model_with_two_sets_of_rotary_frequencies_says_that_hits_across_them_are_counted(config: Path) -> None:
    notes = model_of_files(config, ParallelLayout(), kv_dtype="bf16", state_dtype="fp32").notes
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    rope |= {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "original_max_position_embeddings": 4096}
    config.write_text(json.dumps(CONFIG | {"rope_parameters": rope, "max_position_embeddings": 8192}))
    (more,) = set(model_of_files(config.parent, ParallelLayout(), kv_dtype="bf16", state_dtype="fp32").notes) - {*notes}
    assert "beyond 4,096 tokens" in more


def test_what_cannot_be_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dcp=4: .* has 2 key/value heads, so each is on 2 of 4 ranks"):
        sizes(config, ParallelLayout(tp=4, dcp=4))
    with pytest.raises(ConfigError, match="fp8_ds_mla"):
        sizes(config, kv_dtype="fp8_ds_mla")
    with pytest.raises(ModelError, match=r"without a config\.json"):
        sizes(tmp_path)
    unknown = tmp_path / "unknown.json"
    unknown.write_text(json.dumps({"model_type": "nobody-knows-it"}))
    with pytest.raises(ModelError, match="nobody"):
        sizes(unknown)


def test_files_are_told_apart(config: Path, tmp_path: Path) -> None:
    printed = tmp_path / "inspected.json"
    printed.write_text('{"model": "x", "groups": []}')
    assert is_model_files(config)
    assert is_model_files(config.parent)
    assert not is_model_files(printed)
    assert not is_model_files(tmp_path / "absent")


def test_a_replay_imports_no_torch_until_it_is_needed() -> None:
    code = "import sys, headway.replay.ask.advise, headway.replay.ask.explain; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_without_the_extra_the_message_says_what_to_install(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return original(name, *args, **kwargs)

    for module in [name for name in sys.modules if name.startswith("headway.runtime")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", refuse)
    other = config.with_name("copy.json")
    other.write_text(json.dumps(CONFIG))
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--limit", "5", "--model", str(other), "--memory", "1GB"])
    assert ended.value.code == 2
    assert "headway[serve]" in capsys.readouterr().err
