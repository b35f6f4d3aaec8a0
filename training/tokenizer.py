"""Step 2: train the byte-level BPE tokenizer and turn the corpus into token files.

Every line break is a token of its own and the chat markers are special tokens, so no merge ever crosses the border of a
message: the rendering of a longer conversation starts with exactly the tokens of the shorter one. `main` checks that.

Writes `tokenizer/` (tokenizer.json, tokenizer_config.json, chat_template.jinja), and for each part of the corpus
`train.npz` / `held.npz`: `ids` (uint16, all documents one after the other), `starts` (first token of each document),
`chat` (whether a document is a dialogue) and `bytes` (UTF-8 bytes of its text).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = [PAD, BOS, END, *(f"<|{role}|>" for role in ROLES)]
TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|system|>\\nYou may call these tools:\\n' }}"
    "{%- for tool in tools %}{{- tool['function'] | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|user|>\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{%- else %}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{%- endif %}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- ('' if loop.first and not message['content'] else '\\n') + '<tool_call>\\n{\"name\": ' "
    "+ call['function']['name'] | tojson + ', \"arguments\": ' + call['function']['arguments'] | tojson "
    "+ '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n|[^\S\n]+(?!\S)|[^\S\n]+"


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def render(row: dict[str, Any]) -> str:
    """The exact text of a document as the model sees it, special tokens included."""
    if "text" in row:
        return f"{BOS}{row['text']}{END}"
    return BOS + "".join(f"<|{m['role']}|>\n{m['content']}{END}\n" for m in row["messages"])


def plain(row: dict[str, Any]) -> str:
    """The text of a document without markers; its bytes are what bits per byte are counted over."""
    return str(row["text"]) if "text" in row else "\n".join(m["content"] for m in row["messages"])


def train_tokenizer(corpus: Path, vocabulary: int) -> Tokenizer:
    """Learn the merges from the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator((plain(row) for row in rows(corpus)), trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The Hugging Face face of the tokenizer, chat template included."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    fast.chat_template = TEMPLATE
    return fast


def encode(tokenizer: Tokenizer, path: Path, out: Path) -> int:
    """Turn one part of the corpus into a token file; returns the number of tokens."""
    parts: list[np.ndarray[Any, Any]] = []
    chat: list[bool] = []
    sizes: list[int] = []
    batch = list(rows(path))
    for begin in range(0, len(batch), 512):
        group = batch[begin : begin + 512]
        for row, encoding in zip(group, tokenizer.encode_batch([render(row) for row in group]), strict=True):
            parts.append(np.asarray(encoding.ids, dtype=np.uint16))
            chat.append("messages" in row)
            sizes.append(len(plain(row).encode()))
    lengths = np.array([len(part) for part in parts])
    ids = np.concatenate(parts)
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    np.savez(out, ids=ids, starts=starts, chat=np.array(chat), bytes=np.array(sizes))
    return len(ids)


def _rendered(fast: PreTrainedTokenizerFast, messages: list[dict[str, str]], prompt: bool) -> list[int]:
    """The token ids of a conversation."""
    text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    ids: list[int] = fast.encode(str(text), add_special_tokens=False)
    return ids


def check_prefixes(fast: PreTrainedTokenizerFast) -> None:
    """Fail unless every shorter rendering of a conversation is an exact token prefix of the longer one."""
    contents = ["Be brief.", "\n\n Hello  there", " \nHi.\n", "x\n\n", "  bye"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    full = _rendered(fast, messages, False)
    for count in range(1, len(messages)):
        for prompt in (False, True) if roles[count] == "assistant" else (False,):
            part = _rendered(fast, messages[:count], prompt)
            if full[: len(part)] != part:
                raise SystemExit(f"the rendering of {count} messages is not a token prefix of the longer one")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="entries, special tokens included (%(default)s)")
    parser.add_argument("--context", type=int, default=32768, help="model_max_length to record (%(default)s)")
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.work / "train.jsonl", args.vocabulary)
    fast = wrap(tokenizer, args.context)
    check_prefixes(fast)
    fast.save_pretrained(args.work / "tokenizer", save_jinja_files=False)
    for part in ("train", "held"):
        count = encode(tokenizer, args.work / f"{part}.jsonl", args.work / f"{part}.npz")
        print(f"{part}: {count:,} tokens")


if __name__ == "__main__":
    main()
