"""A tiny random Kimi-Linear model behind the official client, judged by transformers' own `generate`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.server import tiny
from tests.server.fakes import listening
from transformers import AutoModelForCausalLM

from headway.engine import EngineConfig, HubTokenizer
from headway.engine.build import BuiltEngine, build_engine
from headway.server import ServerOptions

TALK = [{"role": "system", "content": "Speak as a machine would."}, {"role": "user", "content": "Wer bist du? 漢字"}]


@dataclass
class Served:
    built: BuiltEngine
    client: openai.OpenAI
    path: Path

    def judge(self, prompt: str, max_tokens: int) -> tuple[str, torch.Tensor]:
        """What transformers answers, and the log-probabilities of its first token."""
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        words = HubTokenizer(tiny.tokenizer())
        ids = torch.tensor([words.encode(prompt)])
        out = model.generate(
            ids, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        return words.decode(out.sequences[0, ids.shape[1] :].tolist()), out.logits[0][0].log_softmax(-1)


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    config = EngineConfig(memory=8 << 20, max_batched_tokens=32, max_running=8, check=True)
    built = build_engine(str(tiny_model), config)
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("tiny")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(built, client, tiny_model)


def test_the_second_call_is_a_hit_and_both_are_what_transformers_answers(served: Served):
    prompt = HubTokenizer(tiny.tokenizer()).render(TALK, answer=True)
    expected, logprobs = served.judge(prompt, 24)
    for i in range(2):
        answer = served.client.chat.completions.create(
            model="tiny", messages=TALK, max_tokens=24, temperature=0, logprobs=True, top_logprobs=3
        )
        assert answer.choices[0].message.content == expected
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == (answer.usage.prompt_tokens - 1 if i else 0)
        first = answer.choices[0].logprobs.content[0]
        assert first.logprob == pytest.approx(float(logprobs.max()), abs=1e-4)
        assert [top.logprob for top in first.top_logprobs] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)
        assert sum(len(entry.bytes) for entry in answer.choices[0].logprobs.content) >= 24


def test_a_streamed_answer_is_the_same(served: Served):
    whole = served.client.chat.completions.create(model="tiny", messages=TALK, max_tokens=24, temperature=0)
    stream = served.client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=24, temperature=0, stream=True, logprobs=True, top_logprobs=2
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    entries = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert len(entries) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_a_seed_gives_the_same_answer_hit_or_not(served: Served):
    def ask(seed: int, salt: str) -> list[str]:
        answer = served.client.completions.create(
            model="tiny",
            prompt="Roll the dice",
            max_tokens=12,
            temperature=1.5,
            seed=seed,
            n=3,
            extra_body={"cache_salt": salt, "ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]

    cold, warm, other = ask(7, "a"), ask(7, "a"), ask(8, "a")
    assert cold == warm == ask(7, "b")
    assert cold != other
    assert len(set(cold)) == 3, "each of the three answers has its own random numbers"


def test_plain_completions_report_logprobs(served: Served):
    answer = served.client.completions.create(model="tiny", prompt="Hello", max_tokens=5, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert found.token_logprobs[0] == pytest.approx(max(found.top_logprobs[0].values()), abs=1e-6)


def test_a_prompt_is_scored_as_a_multiple_choice_harness_asks_for_it(served: Served):
    """In pieces, whatever is cached; log probabilities of its tokens are those of one forward of transformers."""
    words = HubTokenizer(tiny.tokenizer())
    prompts = [words.encode(f"The answer to the question of everything is number {i}") for i in (4, 42)]
    assert len(prompts[0]) > 32, "more than one step computes"
    body = {"cache_salt": "me", "headway": {"explain": True}}
    asked: Any = {"model": "tiny", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    served.client.completions.create(model="tiny", prompt=prompts[0], max_tokens=1, extra_body=body)
    answer = served.client.completions.create(**asked, n=2, extra_body=body)
    model = AutoModelForCausalLM.from_pretrained(served.path, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = scores[range(len(prompt) - 1), prompt[1:]].tolist()
        for choice in answer.choices[2 * i : 2 * i + 2]:
            found = choice.logprobs
            assert found.token_logprobs[0] is None
            assert found.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
            assert "".join(found.tokens[:-1]) == words.decode(prompt)
            assert choice.text.startswith(words.decode(prompt))
            greedy = [
                token == max(top, key=top.get)
                for token, top in zip(found.tokens[1:], found.top_logprobs[1:], strict=True)
            ]
            best = (scores[:-1].argmax(-1) == torch.tensor(prompt[1:])).tolist()
            assert greedy[:-1] == best
    for report in answer.headway["prompts"]:
        assert report["cached_tokens"] == 0
        assert report["losses"][0]["reason"] == "computed_anew"
        assert "log probabilities" in report["losses"][0]["detail"]
    chunks = list(served.client.completions.create(**asked, stream=True))
    streamed = [c.choices[0] for c in chunks if c.choices[0].index == 0]
    assert "".join(choice.text for choice in streamed) == answer.choices[0].text
    tokens = [token for choice in streamed if choice.logprobs for token in choice.logprobs.tokens]
    assert tokens == answer.choices[0].logprobs.tokens


def test_a_loss_is_told_in_the_clients_words(served: Served):
    """Through a tokenizer of transformers, with special tokens between the messages and characters of many bytes."""

    def ask(question: str) -> Any:
        messages = [TALK[0], {"role": "user", "content": question}]
        body = {"cache_salt": "mine", "headway": {"explain": True}}
        return served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=body)

    ask("漢字: wer bist du heute?")
    parted = ask("漢字: wer war das?").headway["losses"][-1]
    assert parted["message"] == {"index": 1, "role": "user"}
    assert parted["before"].endswith("<|end|><|user|>漢字: wer ")
    assert parted["after"].startswith("war das?<|end|>")


def test_end_tokens_come_from_the_model(served: Served):
    ends = [tiny.tokenizer().convert_tokens_to_ids(text) for text in ("<|eos|>", "<|end|>")]
    assert served.built.engine.model.eos == tuple(sorted(ends))
    assert served.built.check.reuse
