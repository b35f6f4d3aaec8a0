"""What was computed serves whoever asks for it next: chats with the official client.

On the built-in model, on a random one with windows and on one of states alone, all with the built-in model's tokenizer;
and on the fake device, where steps can be held up. The right numbers are those of the tokens that two prompts share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from tests.engine.bench import WORLDS
from tests.runtime.tiny_configs import COMMON, MODELS
from tests.server import tiny
from tests.server.fakes import ALPHABET, CharTokenizer, listening, running
from tests.server.test_disconnect import Gate

from headway.engine import EngineConfig
from headway.engine.build import build_engine
from headway.runtime.sources import resolve_source
from headway.server import ServerOptions

Message = dict[str, Any]
LIBRARIAN: list[Message] = [
    {"role": "system", "content": "You are a patient librarian. Answer in one or two sentences."},
    {"role": "user", "content": "Who are you?"},
]
WINDOWED, RECURRENT = "Gemma3", "Mamba2"


@dataclass
class Chat:
    """Conversations with a server."""

    client: openai.OpenAI

    def ask(self, messages: list[Message], salt: str = "", **options: Any) -> Any:
        """An answer, with its explanation."""
        more = {"headway": {"explain": True}, "cache_salt": salt}
        return self.client.chat.completions.create(
            model="kept", messages=messages, temperature=0, extra_body=more, **options
        )


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def go_on(messages: list[Message], said: str) -> list[Message]:
    """The next turn: what was said, as the client got it, and another question."""
    return [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]


def text(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def save_model(path: Path, name: str) -> str:
    """Write a tiny model that has the tokenizer of the built-in one. Returns where."""
    words = transformers.AutoTokenizer.from_pretrained(resolve_source(None)[1])
    kind, arguments = MODELS[name]
    tiny.save_model(path, getattr(transformers, kind)(**(COMMON | arguments | {"vocab_size": len(words)})))
    words.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=["built-in", WINDOWED, RECURRENT])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    name = request.param
    source = None if name == "built-in" else save_model(tmp_path_factory.mktemp("kept") / name, name)
    built = build_engine(source, EngineConfig(memory=64 << 20, check=True))
    assert built.engine.config.prefix_reuse
    with (
        listening(built.engine.start(), built.tokenizer, ServerOptions("kept", explain="all")) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Chat(client)


def test_an_answer_that_is_sent_back_is_the_one_that_was_given(chat: Chat):
    first = chat.ask(LIBRARIAN, max_tokens=24, logit_bias={"89": 100})
    assert (text(first), first.usage.prompt_tokens) == ("t" * 24, 30)
    second = chat.ask(go_on(LIBRARIAN, text(first)), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (53, "answer_end")
    assert second.headway["own_answers"] == [{"start": 30, "stop": 54, "restored": True}]


def test_an_answer_that_a_stop_string_ends_is_reused_up_to_its_visible_text(chat: Chat):
    """Two tokens of the answer are the stop string: the second is never computed, and the first no part of the text."""
    whole = chat.ask(LIBRARIAN, salt="whole", max_tokens=16, logprobs=True)
    pieces = [entry.token for entry in whole.choices[0].logprobs.content]
    stops = [(i, "".join(pieces[i : i + 2])) for i in range(5, 15)]
    at, stop = next((i, stop) for i, stop in stops if "".join(pieces).find(stop) == len("".join(pieces[:i])))
    stopped = chat.ask(LIBRARIAN, max_tokens=16, stop=[stop])
    assert (text(stopped), stopped.usage.completion_tokens) == ("".join(pieces[:at]), at + 2)
    second = chat.ask(go_on(LIBRARIAN, text(stopped)), max_tokens=4)
    assert (cached(second), second.headway["resumed_from"]) == (30 + at, "answer_end")


def test_another_question_behind_the_same_examples_computes_itself_alone(chat: Chat):
    talk = [{"role": "system", "content": "Give the number of letters of a word, and nothing else."}]
    for word in ("apple", "bread", "cherries", "date"):
        talk += [{"role": "user", "content": f"How many letters has {word}? " * 4}]
        talk += [{"role": "assistant", "content": f"It has {len(word)} letters, if I count every one of them once."}]
    first = chat.ask([*talk, {"role": "user", "content": "How many letters has elderberry?"}], max_tokens=2)
    second = chat.ask([*talk, {"role": "user", "content": "And now tell me about figs."}], max_tokens=2)
    history = first.headway["boundaries"][-2]
    assert history == second.headway["boundaries"][-2]
    assert (cached(second), second.headway["resumed_from"]) == (history, "boundary:-2")


def test_others_share_a_marked_part_whatever_follows_it(chat: Chat):
    words = " ".join(f"word{i}" for i in range(60))
    marked = {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}
    more, question = {"type": "text", "text": "And so on."}, {"role": "user", "content": "Why?"}
    first = chat.ask([{"role": "system", "content": [marked]}, question], max_tokens=2)
    second = chat.ask([{"role": "system", "content": [marked, more]}, question], max_tokens=2)
    [place] = first.headway["breakpoints"]
    assert (cached(second), second.headway["resumed_from"]) == (place, "breakpoint")
    assert second.headway["matched_tokens"] == place, "nothing more is common to both"
    for content in ([marked], [marked, more]):
        last = chat.ask([LIBRARIAN[0], {"role": "user", "content": content}], max_tokens=2)
    assert cached(last) == last.headway["matched_tokens"] == last.headway["breakpoints"][0]


# On the fake device, for every kind of layer.


@pytest.mark.parametrize("world", ["hybrid", "window", "chunk", "state", "all"])
def test_whoever_gives_up_three_times_is_answered_in_the_end(world: str):
    """Every attempt computes three steps of 64 tokens before its client has gone; the next goes on from there."""
    config = EngineConfig(max_batched_tokens=64, max_running=8, max_model_len=600)
    with running(WORLDS[world], config=config) as server:
        gate, prompt = Gate(server), "abcdefgh " * 50
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for _ in range(2):
                gate.step(2)
                with pytest.raises(openai.APITimeoutError):
                    client.completions.create(model="fake", prompt=prompt, max_tokens=4, timeout=1.0)
                with server.engine._wakeup:  # the abort has arrived, while the third step is held up
                    assert server.engine._wakeup.wait_for(lambda: server.engine._inbox, 60)
                gate.step()
                server.wait_for_open(lambda count: count == 0)
            gate.open()
            last = client.completions.create(model="fake", prompt=prompt, max_tokens=4, temperature=0)
        assert cached(last) == 6 * 64
        assert last.choices[0].text == server.expected(prompt, 4)


@pytest.mark.parametrize("world", list(WORLDS))
def test_a_stopped_answer_goes_on_from_its_visible_text(world: str):
    with running(WORLDS[world]) as server:
        prompts = [f"Once upon a time {sign}" for sign in ALPHABET]
        prompt, whole = next((p, w) for p in prompts if len(w := server.expected(p, 16)) == 16 and w.find(w[9:12]) == 9)
        stopped = server.complete(prompt, max_tokens=16, stop=[whole[9:12]])
        assert stopped["choices"][0]["text"] == whole[:9]
        following = prompt + whole[:9] + "."
        again = server.complete(following, max_tokens=8)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 9
        assert again["choices"][0]["text"] == server.expected(following, 8)


class Reasoning(CharTokenizer):
    """A template that shows `???` where an answer begins, not before those it repeats, and drops their reasoning."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, answer: bool, options: Mapping[str, Any] | None = None
    ) -> str:
        shown = [dict(m, content=m["content"].rpartition("!")[2]) for m in messages]
        return super().render(shown, answer=answer) + ("???" if answer else "")


@pytest.mark.parametrize("world", ["hybrid", "window", "state", "all"])
def test_a_template_that_shows_something_before_answers_only_loses_no_more_than_that(world: str):
    with running(WORLDS[world], words=Reasoning()) as server:
        first = [{"role": "system", "content": "Be brief and kind to all"}, {"role": "user", "content": "Hello to you"}]
        talk, hits, ends = first, [], []
        for _ in range(3):
            reply = server.post("/v1/chat/completions", messages=talk, max_tokens=3, headway={"explain": True})
            hits.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            ends.append(reply["headway"]["boundaries"][-1])
            talk = go_on(talk, "so I think that!It is a nice day here")
        assert hits[1:] == ends[:-1], "each turn resumes where the last message of the one before ended"


def test_an_answer_that_is_not_restored_is_named_as_the_cause():
    """The tokenizer writes the answer's spaces as other tokens than the model did."""

    class Spelling(CharTokenizer):
        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode(tokens).lower()

    for restore in (True, False):
        with running(words=Spelling(), restore_answers=restore, explain="all") as server:
            prompt = next(
                p for p in ALPHABET if server.expected(p, 6) != (w := server.expected(p, 6).lower()) and len(w) == 6
            )
            first = server.complete(prompt, max_tokens=6)["choices"][0]["text"]
            again = server.complete(prompt + first + ".", max_tokens=1, headway={"explain": True})
            hit, report = again["usage"]["prompt_tokens_details"]["cached_tokens"], again["headway"]
            assert report["own_answers"] == [{"start": 1, "stop": 7, "restored": restore}]
            assert (hit == 6) == restore
            told = [loss["detail"] for loss in report["losses"] if "--no-restore-answers" in loss["detail"]]
            assert bool(told) != restore
            server.post("/reset_prefix_cache")
            fresh = server.complete(prompt + first + ".", max_tokens=1, headway={"explain": True})
            assert fresh["headway"]["own_answers"] == [], "forgotten with the cache"


class Triples(CharTokenizer):
    """A capital letter and the two signs behind it are one character."""

    def decode(self, tokens: Sequence[int]) -> str:
        signs, written = super().decode(tokens), ""
        while signs:
            size = 3 if signs[0].isupper() else 1
            written += signs[0] if len(signs) >= size else "\ufffd"
            signs = signs[size:]
        return written


@pytest.mark.parametrize("world", ["hybrid", "window", "state", "all"])
def test_an_answer_that_ends_inside_a_character_goes_on_before_it(world: str):
    with running(WORLDS[world], words=Triples()) as server:
        for prompt in (f"once upon a time {sign}" for sign in ALPHABET):
            signs = server.expected(prompt, 12)
            if (
                len(signs) == 12
                and Triples().decode(CharTokenizer().encode(signs[:10])).isascii()
                and signs[10].isupper()
            ):
                break
        cut = server.complete(prompt, max_tokens=12)["choices"][0]["text"]
        assert cut.endswith("\ufffd")
        again = server.complete(prompt + cut + ".", max_tokens=4)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 10
