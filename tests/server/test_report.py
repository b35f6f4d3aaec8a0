"""Why no more was reused, in the client's own words, and to nobody else's cost; through the official client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.engine.bench import WORLDS
from tests.server.fakes import ByteTokenizer, Running, running

from headway.engine import EngineConfig

CONFIG = EngineConfig(max_batched_tokens=1024, max_running=8, max_model_len=2600)


@pytest.fixture(scope="module", params=["full", "hybrid", "window"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(WORLDS[request.param], blocks=3000, config=CONFIG, words=ByteTokenizer()) as server:
        server.world = request.param  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    server.post("/reset_prefix_cache")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, *texts: str, salt: str = "", **options: Any) -> Any:
    """A conversation that a system prompt opens."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    body: dict[str, Any] = {"headway": {"explain": True} | options} | ({"cache_salt": salt} if salt else {})
    return client.chat.completions.create(
        model="fake",
        messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)],
        max_tokens=2,
        temperature=0,
        extra_body=body,
    )


def told(client: openai.OpenAI, *texts: str, salt: str = "mine", **options: Any) -> Any:
    """The report of a conversation, in full."""
    return chat(client, *texts, salt=salt, **options).headway


def test_rpt_10_a_loss_names_the_message_and_shows_the_clients_own_text(client: openai.OpenAI):
    header, rest = "x-header: cch={}; entry=cli\n", "You are a careful agent. Be brief. " * 20
    system = [(header.format(cch) + rest)[:740] for cch in ("36ee5", "0aaa9")]
    told(client, system[0], "Hello")
    report = told(client, system[1], "Hello")
    start = len("<system>x-header: cch=")
    parted = report["losses"][-1]
    assert (parted["reason"], parted["start"], parted["stop"]) == ("parted", start, report["prompt_tokens"])
    assert parted["message"] == {"index": 0, "role": "system"}
    assert parted["before"] == "<system>x-header: cch="
    assert parted["after"] == "0aaa9; entry=cli\nYou are"
    changed = report["changed"]
    assert changed["told"].startswith(f"changed at token {start}, message 0 (system), `cch=0aaa9`; ")
    same = len(f"; entry=cli\n{system[0].partition(chr(10))[2]}</><user>Hello</><assistant>")
    assert (changed["start"], changed["stop"], changed["same_tokens"]) == (start, start + 5, same)


@pytest.mark.parametrize(
    ("texts", "index", "role", "before", "after"),
    [
        (("Be brief", "What is it", "A cat", "And this"), 1, "user", "ief</><user>What is ", "it</>"),
        (("Be brief", "What is that", "A dog", "And this"), 2, "assistant", "that</><assistant>A ", "dog</>"),
        (("Be brief", "What is that", "A cat", "And that"), 3, "user", "A cat</><user>And th", "at</>"),
        (("Be brief", "What is that", "A cat.", "And this"), 2, "assistant", "</><assistant>A cat", ".</>"),
        (("Be brief", "What is thät", "A cat", "And this"), 1, "user", "ief</><user>What is th", "ät</>"),
    ],
)
def test_each_message_is_found(
    client: openai.OpenAI, texts: tuple[str, ...], index: int, role: str, before: str, after: str
):
    told(client, "Be brief", "What is that", "A cat", "And this")
    parted = told(client, *texts)["losses"][-1]
    assert parted["message"] == {"index": index, "role": role}
    assert parted["before"].endswith(before)
    assert parted["after"].startswith(after)


def test_behind_the_last_message_there_is_none(client: openai.OpenAI):
    told(client, "Be brief", "Hello")
    (last,) = told(client, "Be brief", "Hello")["losses"]
    assert (last["reason"], last["message"], last["after"]) == ("last_token", None, ">")


def test_rpt_09_a_clock_in_front_of_a_stable_prompt(server: Running, client: openai.OpenAI):
    """The clock is named, with what it costs; at the end of the prompt it costs nothing."""
    constant = "".join(chr(97 + i * i % 26) for i in range(2000))

    def asked(number: int) -> Any:
        return told(client, f"Now 2026-11-30 08:{number:02}. {constant}", f"q{number}")

    start = len("<system>Now 2026-11-30 08:")
    for number in (12, 29, 30):
        report = asked(number)
    changed = report["changed"]
    assert (changed["start"], changed["stop"], changed["text"]) == (start, start + 2, "08:30")
    assert changed["same_tokens"] == len(f". {constant}</><user>q")
    assert "2,012 tokens behind it are the same as before" in changed["told"]
    assert changed["message"] == {"index": 0, "role": "system"}
    server.post("/reset_prefix_cache")
    for number in (12, 29, 30):
        report = told(client, constant, f"q{number} at 08:{number:02}")
    assert report["cached_tokens"] >= len(f"<system>{constant}</>")
    assert report["changed"] is None


def test_no_change_is_told_of_what_is_new(client: openai.OpenAI):
    told(client, "Be brief", "What is that?")
    for texts in (("Be brief", "Who is it?"), ("Another rule", "Who is that?"), ("Be brief", "What is that? " * 20)):
        assert told(client, *texts)["changed"] is None


# ---- what it must not tell

SECRET = "You guard the door. The password is swordfish; tell it to nobody but the owner."


def test_no_change_is_told_in_front_of_what_matches(client: openai.OpenAI):
    text = "what may be reused, and what may not"
    told(client, f"a {text}")
    told(client, f"a very {text}")
    report = told(client, f"a {text}")
    assert report["matched_tokens"] == report["prompt_tokens"]
    assert report["changed"] is None


def probe(client: openai.OpenAI, text: str, salt: str) -> dict[str, Any]:
    """All that an answer says to who leaves nothing behind, but for the answer's text, its name and times."""
    body: dict[str, Any] = {"headway": {"explain": True, "no_store": True}} | ({"cache_salt": salt} if salt else {})
    answer = client.completions.create(model="fake", prompt=text, max_tokens=1, temperature=0, extra_body=body)
    told: dict[str, Any] = answer.model_dump()
    for name in ("id", "created", "choices"):
        del told[name]
    del told["headway"]["seconds"]
    for loss in told["headway"]["losses"]:  # its own words
        del loss["before"], loss["after"]
    return told


def oracle(client: openai.OpenAI, salt: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the right and a wrong guess of the next character are told, at each place of the password."""
    client.completions.create(
        model="fake", prompt=SECRET, max_tokens=1, extra_body={"cache_salt": salt} if salt else {}
    )
    place = SECRET.index("swordfish")
    places = range(place, place + len("swordfish"))
    return [(probe(client, SECRET[: i + 1], salt), probe(client, SECRET[:i] + "#", salt)) for i in places]


def test_a_strangers_prompt_cannot_be_spelled_out(server: Running, client: openai.OpenAI):
    """A password was recovered token by token: with `no_store` each guess was told how far it was right."""
    for right, wrong in oracle(client, salt=""):
        if server.world == "full":  # type: ignore[attr-defined]  # such a model resumes at any token: usage says it
            cached = right["usage"]["prompt_tokens_details"]["cached_tokens"]
            report = right["headway"]
            assert report["matched_tokens"] == report["cached_tokens"] == cached
            assert [(loss["start"], loss["stop"]) for loss in report["losses"]] == [(cached, report["prompt_tokens"])]
        else:
            assert right == wrong
        assert {loss["reason"] for told in (right, wrong) for loss in told["headway"]["losses"]} <= {
            "not_told",
            "last_token",
        }
        assert right["headway"]["changed"] is wrong["headway"]["changed"] is None


def test_who_shares_the_salt_is_told(client: openai.OpenAI):
    """Without this the test above could not fail."""
    assert all(right != wrong for right, wrong in oracle(client, salt="mine"))


def test_another_salt_is_told_nothing_of_it(client: openai.OpenAI):
    """Not even where it has sent the beginning itself."""
    client.completions.create(model="fake", prompt=SECRET, max_tokens=1, extra_body={"cache_salt": "victim"})
    place = SECRET.index("swordfish") + 3
    for beginning in ("", SECRET[: place - 3]):
        if beginning:
            client.completions.create(
                model="fake", prompt=beginning, max_tokens=1, extra_body={"cache_salt": "stranger"}
            )
        right = probe(client, SECRET[: place + 1], "stranger")
        assert right == probe(client, SECRET[:place] + "#", "stranger")
        assert right["headway"]["losses"][-1]["reason"] == ("parted" if beginning else "nothing_matched")


# ---- options of the server


def test_explanations_can_be_off_or_for_all():
    with running(explain="off") as server:
        refused = server.complete("Hello", 400, headway={"explain": True})["error"]
        assert (refused["param"], refused["code"]) == ("headway.explain", "unsupported_parameter")
        assert "headway" not in server.complete("Hello", max_tokens=2)
    with running(explain="all") as server:
        server.complete("Once upon a time", max_tokens=2)
        server.complete("Once upon a day", max_tokens=2, cache_salt="other")
        report = server.complete("Once upon a dot", max_tokens=2, headway={"explain": True})["headway"]
        assert report["matched_tokens"] == len("Once upon a ")
        assert report["losses"][-1]["reason"] == "parted"
        salted = server.complete("Once upon a time", max_tokens=2, cache_salt="third", headway={"explain": True})
        assert salted["headway"]["losses"][0]["reason"] == "other_namespace"


def test_each_key_has_its_own_salt():
    with running(api_key="first", more_keys=("second",), salt_by_key=True) as server:

        def ask(key: str, salt: str | None = None) -> Any:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                body = {"headway": {"explain": True}} | ({"cache_salt": salt} if salt else {})
                answer = client.completions.create(
                    model="fake", prompt="Once upon a time", max_tokens=2, extra_body=body
                )
                return answer.headway["cached_tokens"], [loss["reason"] for loss in answer.headway["losses"]]

        fresh, again = (0, ["nothing_matched"]), (15, ["last_token"])
        assert [ask("first"), ask("first"), ask("second"), ask("second")] == [fresh, again, fresh, again]
        assert [ask("first", "own"), ask("second", "own")] == [fresh, fresh], (
            "a salt parts the prompts of a key further"
        )
        with pytest.raises(openai.AuthenticationError):
            ask("third")
