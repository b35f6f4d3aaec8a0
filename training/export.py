"""Step 4: write the model folder that ships with the package, then check what was written.

Weights are rounded to bf16 (the few that the library insists on stay fp32). The folder is loaded back through the
library's Auto classes in fp32, and the export fails unless a continuation in chunks over a cache gives the logits of
one full forward pass, an early token still moves the last logits, and the folder is small enough.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

BUILTIN = Path(__file__).parents[1] / "packages/builtin-model/src/headway_builtin_model"
LARGEST_FOLDER = 15_000_000
PROMPTS = ("Hello!", "What does the word lighthouse mean?", "What is a cursor in Python?", "Who are you?")


def write_folder(best: Path, tokenizer: Path, out: Path) -> None:
    """Fill `out` with the weights of `best` in bf16, the configurations and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(best, dtype=torch.bfloat16)
    settings: dict[str, Any] = json.loads((tokenizer / "tokenizer_config.json").read_text())
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.9
    )
    model.save_pretrained(out)
    shutil.copyfile(tokenizer / "tokenizer.json", out / "tokenizer.json")
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)


@torch.no_grad()
def continuation_error(model: Any, ids: torch.Tensor, cuts: tuple[int, ...]) -> float:
    """Largest difference between the logits of one forward pass and of the same tokens in chunks over a cache."""
    whole = model(input_ids=ids, use_cache=False).logits
    cache, parts, begin = None, [], 0
    for end in (*cuts, ids.shape[1]):
        out = model(input_ids=ids[:, begin:end], cache=cache, use_cache=True)
        cache, begin = out.cache, end
        parts.append(out.logits)
    return float((torch.cat(parts, 1) - whole).abs().max())


@torch.no_grad()
def early_token_effect(model: Any, ids: torch.Tensor) -> float:
    """How far the last logits move when the second token changes."""
    other = ids.clone()
    other[0, 1] = (other[0, 1] + 7) % model.config.vocab_size
    return float((model(input_ids=ids).logits[0, -1] - model(input_ids=other).logits[0, -1]).abs().max())


def answer(model: Any, tokenizer: Any, question: str, tokens: int = 160) -> tuple[str, bool]:
    """The greedy answer to a question, and whether it ended by itself."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(out, skip_special_tokens=True)), int(out[-1]) == tokenizer.eos_token_id


def check(out: Path) -> None:
    """Load the folder as a user would and verify it; raises SystemExit with what is wrong."""
    size = sum(path.stat().st_size for path in out.iterdir())
    if size > LARGEST_FOLDER:
        raise SystemExit(f"{out} has {size:,} bytes; at most {LARGEST_FOLDER:,} are wanted")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model.eval()
    text = tokenizer("The library of the old house had a long table, and ", return_tensors="pt")["input_ids"]
    ids = model.generate(text, max_new_tokens=150, min_new_tokens=150, do_sample=False)
    error = max(continuation_error(model, ids, cuts) for cuts in ((64,), (41, 58), tuple(range(100, ids.shape[1]))))
    effect = early_token_effect(model, ids)
    print(f"{size:,} bytes; {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"chunks against one pass: {error:.1e}; an early token moves the last logits by {effect:.2f}")
    if error > 1e-4 or effect < 1e-3:
        raise SystemExit("a continuation over the cache does not equal the full forward pass")
    for question in PROMPTS:
        reply, ended = answer(model, tokenizer, question)
        print(f"> {question}\n{reply}{'' if ended else ' [cut]'}\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--out", type=Path, default=BUILTIN, help="model folder (%(default)s)")
    args = parser.parse_args()
    write_folder(args.work / "best", args.work / "tokenizer", args.out)
    check(args.out)


if __name__ == "__main__":
    main()
