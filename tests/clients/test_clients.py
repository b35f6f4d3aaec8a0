"""What the table of clients rests on: the relay, and what exact sharing allows. `make clients` runs the clients."""

import re
from urllib.parse import urlsplit

import httpx
import pytest
from tests.clients.catalogue import CLIENTS
from tests.clients.page import PAGE, render
from tests.clients.relay import relaying
from tests.clients.sharing import allowed
from tests.server.fakes import running


def test_what_exact_sharing_allows():
    first, second = ([1, 2, 3], [4, 5, 6]), ([1, 2, 3, 4, 5, 7], [8])
    assert allowed([first, second]) == [0, 5], "not the last token of an answer, nor what differs"
    assert allowed([first, first]) == [0, 2], "the last token of a prompt is computed"
    assert allowed([([9, 9], []), first]) == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("explain", [False, True])
def test_the_relay_passes_on_what_is_said_and_keeps_it(stream: bool, explain: bool):
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 5, "stream": stream}
    with (
        running(explain="all") as server,
        relaying(urlsplit(server.url).port or 0, explain=explain) as (port, exchanges),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        texts = [http.post("/v1/chat/completions", json=body).text for _ in range(2)]
        refused = http.post("/v1/chat/completions", json={"messages": []})
        direct = server.http.post("/v1/chat/completions", json=body).text
    assert ('"headway"' in texts[1]) == explain
    if not explain:
        changes = r'"(id|created)":("[^"]*"|\d+)'
        assert re.sub(changes, "", texts[1]) == re.sub(changes, "", direct)
    prompt = len("<user>Hello</><assistant>")
    assert [one.cached_of_prompt for one in exchanges[:2]] == [(0, prompt), (prompt - 1, prompt)]
    assert exchanges[1].body == body, "as the client sent it"
    assert bool(exchanges[1].report) == explain
    assert refused.status_code == exchanges[2].status == 400
    assert "messages" in exchanges[2].fault


def test_every_client_has_a_program_and_the_page_says_what_was_not_run():
    assert all(client.program.is_file() for client in CLIENTS)
    page = render(CLIENTS, {"llm": {"client": "llm", "outcome": "not run", "reason": "no such thing"}})
    assert "| llm | | not run: no such thing |" in page
    assert page.count("not run") == len(CLIENTS)
    assert PAGE.read_text(encoding="utf-8").splitlines()[0] == page.splitlines()[0]
