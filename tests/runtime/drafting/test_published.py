"""Heads for multi-token prediction in a checkpoint, compared with transformers' own use of them."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.runtime.tiny_configs import COMMON, GQA, MODELS
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from headway.cache import CacheConfig, CacheGeometry, PrefixCache
from headway.engine import DraftPlanner, EngineConfig, GenerationRequest, RunningRequest, Scheduler
from headway.engine.ranks.in_process import LocalExecutor
from headway.errors import ModelError
from headway.runtime.drafting.drafter import DraftRequest, Proposal
from headway.runtime.drafting.loading import groups_without_weights, load_drafter
from headway.runtime.drafting.mtp import MtpDrafter
from headway.runtime.drafting.speculator import Speculator
from headway.runtime.forward.runner import ModelRunner
from headway.runtime.model.inspection import inspect_model

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3": MODELS["DeepseekV3"],
    "Glm4Moe": (
        "Glm4MoeConfig",
        GQA
        | {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
}
TOKENS = 3


def random_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" not in path:
                parameter.normal_(0.0, 0.15, generator=generator)


def save_with_head(name: str, folder: Path) -> Path:
    """A tiny model whose checkpoint has one head, in the form in which such checkpoints are published."""
    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**(COMMON | arguments | {"num_mtp_layers": 1}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    random_weights(model, 0)
    model.save_pretrained(folder)
    heads = MtpModel(model, 1)
    random_weights(heads.layers, 1)
    at = config.num_hidden_layers
    weights = load_file(folder / "model.safetensors")
    for key, tensor in heads.layers[0].state_dict().items():
        plain = key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", key.startswith("post_norm"))
        for part, value in experts(plain, tensor):
            weights[f"model.layers.{at}.{part}"] = value.contiguous().clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def experts(key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A weight as it is published: of each expert by itself."""
    if key == "mlp.experts.gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        parts = (("gate_proj", gate), ("up_proj", up))
    elif key == "mlp.experts.down_proj":
        parts = (("down_proj", tensor),)
    else:
        return [(key, tensor)]
    return [(f"mlp.experts.{i}.{name}.weight", each) for name, part in parts for i, each in enumerate(part)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_with_head(name, tmp_path_factory.mktemp("heads") / name) for name in CONFIGS}


@cache
def loaded(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def by_transformers(model: PreTrainedModel, heads: MtpModel, tokens: list[int], count: int) -> list[int]:
    """What transformers' own head drafts behind `tokens`, computed over the whole sequence without our memory."""
    hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    cache, positions = MtpCache(config=heads.config), torch.arange(1, len(tokens))[None]
    hidden = heads.forward_layer(0, hidden, positions, cache, input_ids=torch.tensor([tokens[1:]]))[:, -1:]
    drafts: list[int] = []
    while True:
        drafts.append(int(heads._project_to_logits(hidden)[0, -1].argmax()))
        if len(drafts) == count:
            return drafts
        positions = positions[:, -1:] + 1
        hidden = heads.forward_layer(0, hidden, positions, cache, input_ids=torch.tensor([drafts[-1:]]))


class Seen:
    """A drafter that notes what it is asked and proposes; every other draft is what the model will say."""

    def __init__(self, drafter: Any, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._drafter, self._answers = drafter, answers
        self.proposed: list[tuple[list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, requests: list[DraftRequest]) -> list[Proposal]:
        made = self._drafter.propose(requests)
        for i, (request, proposal) in enumerate(zip(requests, made, strict=True)):
            prompt, output = request.sample.prompt.tolist(), request.sample.output.tolist()
            self.proposed.append(([*prompt, *output], proposal.tokens.tolist()))
            if len(self.proposed) % 2:
                right = self._answers[tuple(prompt)][len(output) : len(output) + len(proposal.tokens)]
                made[i] = Proposal(np.array([*right, *proposal.tokens[len(right) :]], dtype=np.int32))
        return made


@pytest.mark.parametrize("name", CONFIGS)
def test_it_drafts_what_transformers_drafts_and_answers_stay_the_same(name: str, folders: dict[str, Path]) -> None:
    model = loaded(folders[name])
    heads = MtpModel(model, 1)
    rng = np.random.default_rng(0)
    stem = rng.integers(3, 256, 60).tolist()
    prompts = [[*stem[:cut], *rng.integers(3, 256, 9).tolist()] for cut in (60, 40, 60)]
    answers = {}
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False)
        answers[tuple(prompt)] = out[0, len(prompt) :].tolist()
    layout = inspect_model(model)
    drafter = Seen(load_drafter("mtp", model, folders[name], TOKENS), answers)
    assert isinstance(drafter._drafter, MtpDrafter)
    heads.layers[0] = drafter._network.layer
    assert drafter.groups == groups_without_weights("mtp", folders[name], torch.float32)
    assert drafter.groups[0].lookahead == 1
    groups = (*layout.groups, *drafter.groups)
    blocks = 3 * CacheGeometry(groups, block_tokens=16).peak_blocks(120)
    store = PrefixCache(CacheConfig(groups, blocks, block_tokens=16, cost=layout.cost, check=True))
    runner = ModelRunner(model, layout, store.geometry, blocks)
    runner.arena.data.fill_(0xFF)
    executor = LocalExecutor(runner, Speculator(runner, drafter))
    config = EngineConfig(max_batched_tokens=30, max_running=2)
    scheduler = Scheduler(store, config, planner=DraftPlanner("mtp", TOKENS))
    running = []
    for i, prompt in enumerate(prompts):
        asked = GenerationRequest(np.array(prompt, dtype=np.int32), 14)
        running.append(RunningRequest.start(asked, str(i), i, 0.0))
        scheduler.add(running[-1])
        while (i != 1) and (scheduled := scheduler.schedule()) is not None:  # the first alone, then two at once
            scheduler.complete(scheduled, executor.run(scheduled.work))
    for request, prompt in zip(running, prompts, strict=True):
        assert request.answer.tolist() == answers[tuple(prompt)]
    assert running[2].cached_tokens > 50, "a hit, one token less for the look ahead"
    assert 0 < scheduler.counters.accepted_tokens < scheduler.counters.drafted_tokens
    for tokens, proposed in drafter.proposed:
        assert proposed == by_transformers(model, heads, tokens, len(proposed))


def test_the_weights_are_those_of_the_checkpoint(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        drafter = load_drafter("mtp", loaded(folder), folder)
        weights = load_file(folder / "model.safetensors")
        own = drafter._network.layer.state_dict()
        assert torch.equal(own["eh_proj.weight"], weights["model.layers.3.eh_proj.weight"]), name
        assert torch.equal(own["post_norm.weight"], weights["model.layers.3.shared_head.norm.weight"]), name
        part = own["mtp_block.mlp.experts.down_proj"][5]
        assert torch.equal(part, weights["model.layers.3.mlp.experts.5.down_proj.weight"]), name


def test_a_head_of_which_a_weight_is_missing_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["DeepseekV3"], tmp_path / "m"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.hnorm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ModelError, match=r"cannot load the heads of the model: .*hnorm"):
        load_drafter("mtp", model, folder)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [("qwen3_next", "mtp.fc.weight"), ("longcat_flash", "model.mtp.norm"), ("hy_v4", "model.mtp_layers.0.norm")],
)
def test_heads_in_another_form_are_refused_by_its_name(kind: str, weight: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({weight: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"heads .* in the form of {kind}, which is not run"):
        groups_without_weights("mtp", tmp_path, torch.float32)


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot load the config of the model"):
        groups_without_weights("mtp", tmp_path, torch.float32)


def test_it_has_the_types_of_its_model(folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["DeepseekV3"], dtype=torch.bfloat16)
    drafter = load_drafter("mtp", model, folders["DeepseekV3"])
    assert drafter._network.layer.eh_proj.weight.dtype == torch.bfloat16
    assert drafter.groups == groups_without_weights("mtp", folders["DeepseekV3"], torch.bfloat16)


def test_a_model_without_heads_brings_none(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["DeepseekV3"] / "config.json", tmp_path)
    with pytest.raises(ModelError, match="the model brings no such drafter along"):
        groups_without_weights("mtp", tmp_path, torch.float32)
