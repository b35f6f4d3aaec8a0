"""A vLLM that computes, and what `headway replay` predicts of it: the traffic, its counters, and the command to run.

    PYTHONPATH=UNPACKED_VLLM_FOR_CPUS:src:. python benchmarks/vllm/against_vllm.py FOLDER [--families Llama,Qwen3-Next]

Tiny models are made in FOLDER, and each gets the same requests: conversations that begin alike and take turns, in a
pool that holds a part of them. vLLM's own prefix cache is on. For each model FOLDER gets the requests as a recording of
tokens, and vLLM's counters of its prefix cache as its `/metrics` has them. Printed is, for each, the command that
predicts the counters.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
from tests.vllm.computes import engine, models

from headway.formats import RecordingWriter

FAMILIES = ("Llama", "Gemma 3", "gpt-oss", "Qwen3-Next", "Granite hybrid", "Falcon-H1")
RUNNING, STEP, ANSWER = 4, 64, 8


def traffic(seed: int, scale: int, talks: int = 16, turns: int = 4) -> list[list[int]]:
    """Prompts of conversations that begin alike, in the order they are asked in; texts are `scale` times as long."""
    chance = random.Random(seed)

    def words(count: int) -> list[int]:
        return [chance.randrange(3, models.VOCABULARY) for _ in range(count * scale)]

    systems = [words(80), words(120)]
    texts = [list(systems[talk % 2]) for talk in range(talks)]
    asked = []
    for _ in range(turns):
        for talk in chance.sample(range(talks), talks):
            texts[talk] += words(chance.randrange(20, 60))
            asked.append(list(texts[talk]))
            texts[talk] += words(chance.randrange(10, 30))
    return asked


def serve(folder: str, recording: str, counters: str, blocks: int, scale: int) -> dict[str, Any]:
    """Ask a model everything, at most RUNNING at once. Returns the size of its pages and the bytes of its pool."""
    made = engine.Engine(
        Path(folder),
        "vllm",
        length=engine.LENGTH * scale,
        dtype="bfloat16",
        max_num_seqs=RUNNING,
        max_num_batched_tokens=STEP,
        num_gpu_blocks_override=blocks,
        disable_log_stats=False,
    )
    prompts = traffic(1, scale)
    for i, prompt in enumerate(prompts):
        made.ask(str(i), prompt, ANSWER)
    answers: dict[str, engine.Answer] = {}
    while made.busy:
        answers |= made.step()
    with Path(recording).open("w", encoding="utf-8") as file:
        writer = RecordingWriter(file, content="tokens", model=folder)
        for i, prompt in enumerate(prompts):
            writer.add(float(i), np.array(prompt), np.array(answers[str(i)].tokens))
    told = {one.name: one.value for one in made._llm.get_metrics() if one.name.startswith("vllm:prefix_cache_")}
    Path(counters).write_text("".join(f"{name}_total {value}\n" for name, value in told.items()), encoding="utf-8")
    config = made.scheduler.kv_cache_config
    page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    layers = max(len(group.layer_names) for group in config.kv_cache_groups)
    return {"groups": made.groups, "blocks": config.num_blocks, "page_bytes": page * layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--blocks", type=int, default=60, help="pages of the pool")
    parser.add_argument("--scale", type=int, default=1, help="texts so many times as long, at most 4: for large pages")
    asked = parser.parse_args()
    for family in asked.families.split(","):
        folder = asked.folder / family.replace(" ", "-")
        if not (folder / "config.json").exists():  # also in a fork: threads of torch would not survive one
            engine.apart(models.make, family, folder, log=folder.with_suffix(".log"))
        recording, counters = folder.with_suffix(".jsonl"), folder.with_suffix(".metrics")
        paths = (str(folder), str(recording), str(counters))
        try:
            found = engine.apart(serve, *paths, asked.blocks, asked.scale, log=folder.with_suffix(".log"))
        except RuntimeError as error:  # a family that this vLLM does not compute on CPUs
            print(f"# {family}: {error}", flush=True)
            continue
        print(f"# {family}, vLLM {engine.vllm_version()}: {found}")
        pages = f"running={RUNNING},step_tokens={STEP},block_tokens={next(iter(found['groups'].values()))}"
        memory = found["blocks"] * found["page_bytes"]
        states = "--state-dtype bf16 " if any(name.startswith("Mamba") for name in found["groups"]) else ""
        print(
            f"headway replay {recording} --model {folder} {states}--memory {memory} "
            f"--preset vllm-0.32,{pages} --against {counters}",
            flush=True,
        )


if __name__ == "__main__":
    main()
