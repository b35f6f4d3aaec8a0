"""Folders that stand for the models which vLLM's tests name: a configuration, a tokenizer of five words, no weights.

    python models.py FOLDER

They are written as a cache of the Hugging Face hub, so that the tests run unmodified, offline, with HF_HOME=FOLDER.
`FOLDER/site` goes onto PYTHONPATH: it declares two operators of torchvision that a torch without CUDA cannot load.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlavaConfig, OPTConfig, Qwen3NextConfig

REVISION = "0" * 40
MODELS: dict[str, tuple[Any, str]] = {
    "facebook/opt-125m": (OPTConfig, "OPTForCausalLM"),
    "facebook/opt-350m": (OPTConfig, "OPTForCausalLM"),
    "Qwen/Qwen2.5-VL-3B-Instruct": (OPTConfig, "OPTForCausalLM"),  # its test sends text alone
    "llava-hf/llava-1.5-7b-hf": (LlavaConfig, "LlavaForConditionalGeneration"),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (Qwen3NextConfig, "Qwen3NextForCausalLM"),
}
WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
OPERATORS = """
import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(WORDS))
    for name, (config, architecture) in MODELS.items():
        place = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(REVISION)
        given = {"text_config": LlamaConfig(max_position_embeddings=4096)} if config is LlavaConfig else {}
        fields = {**config(**given).to_dict(), "architectures": [architecture], "torch_dtype": "float16"}
        files = {"config": fields, "tokenizer_config": TOKENIZER}
        if config is LlavaConfig:
            files |= {"preprocessor_config": IMAGES, "processor_config": PROCESSOR}
        for file, content in files.items():
            (snapshot / f"{file}.json").write_text(json.dumps(content))
        tokenizer.save(str(snapshot / "tokenizer.json"))
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(OPERATORS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
