"""From a request's body to its response, the same for both endpoints: prepare, submit, then collect or stream.

Whatever happens to the HTTP request (answered, failed, cancelled, the client gone), leaving `_aborting` ends its
requests in the engine, so that no answer is computed for nobody. A client that goes away is noticed while its request
waits in the queue as well, because something always listens to the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from headway.cache import ResetReport
from headway.engine import Delta, Engine, RequestHandle, RequestResult, TextTokenizer
from headway.errors import HeadwayError, RequestError
from headway.runtime.interface import Constraint
from headway.server.answers import GivenAnswers
from headway.server.chat.reading import AnswerForm, answer_form
from headway.server.chat.tools import ToolLists, argument_forms, constrained_calls, idle_fields, tools_to_call
from headway.server.constraints import constraint_of
from headway.server.errors import log_failure
from headway.server.formats import ChatFormat, Choice, CompletionFormat, Event, Format, results
from headway.server.generation import generation_requests
from headway.server.kv_publisher import KvEventPublisher
from headway.server.pins import PinIds
from headway.server.prompts import PreparedPrompt, prepare_chat, prepare_completions
from headway.server.protocol import ChatRequest, CommonFields, CompletionRequest, GenerationFields
from headway.server.recorder import Recorder
from headway.server.records import ignored_fields
from headway.server.report import headway_report, prompt_text
from headway.server.tokenizing import TokenizingThreads

__all__ = ["Asked", "GenerationService", "ServerOptions"]

logger = logging.getLogger(__name__)

_MOST_IGNORED = 256
"""Fields that the log names."""
_MOST_FOLLOWED = 256
"""Forms of which it is remembered that each of their parts can be followed."""

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=CommonFields)


@dataclass(frozen=True)
class ServerOptions:
    """What the server is told beside the engine.

    Attributes:
        model_name: Under which the model is served.
        api_keys: One of which clients must send as bearer token; empty lets everybody in.
        max_body_bytes: Largest body of a request.
        recorder: Records what is asked and answered; None for no recording. The application closes it.
        explain: To whom explanations are told in full, "off", "own" (to prompts with a salt) or "all".
        salt_by_key: Requests share prefixes with those of the same key only.
        restore_answers: Prompts that send an answer back as text get the ids that it was given in.
        client_timeout: Seconds that a client may take to send its request, or to take a piece of its answer.
        strict: Fields that are not known are refused, not ignored.
        kv_events: Publishes what is cached; None for no KV events. The application closes it.
        cors_origins: Origins of web pages that may call from a browser; `*` for all.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024**2
    recorder: Recorder | None = None
    explain: str = "own"
    salt_by_key: bool = False
    restore_answers: bool = True
    client_timeout: float = 60.0
    strict: bool = False
    kv_events: KvEventPublisher | None = None
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """A chat that is asked for in another dialect.

    Attributes:
        request: The chat.
        ignored: Fields of the body that were ignored.
        write: Makes the format of the answers, from how the model writes them.
        names: Fields of a chat, and those of the dialect that they come from.
    """

    request: ChatRequest
    ignored: Sequence[str]
    write: Callable[[AnswerForm | None], Format]
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Job:
    """The answers to one HTTP request."""

    format: Format
    prompts: Sequence[PreparedPrompt]
    handles: Sequence[RequestHandle]
    tell: Callable[[PreparedPrompt, Sequence[RequestResult]], Awaitable[dict[str, Any]]]
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice(i) for i in range(len(self.handles))]

    async def report(self) -> dict[str, Any]:
        """The `headway` member of the response, if there is one: for one prompt its report, for several a list."""
        ended, each = results(self.choices), len(self.handles) // len(self.prompts)
        reports = [await self.tell(prompt, ended[i * each : (i + 1) * each]) for i, prompt in enumerate(self.prompts)]
        if not any(reports):
            return {}
        return {"headway": reports[0] if len(reports) == 1 else {"prompts": reports}}


class GenerationService:
    """Answers requests with an engine.

    Attributes:
        engine: The engine.
        tokenizer: The model's tokenizer.
        options: The server's options.
        pins: The pins that clients were told of.
        answers: What was answered. An observer of the engine, if it is to know any.
    """

    def __init__(self, engine: Engine, tokenizer: TextTokenizer, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.answers = GivenAnswers(restore=options.restore_answers)
        self.tokenizer = tokenizer
        self._tokenizing = TokenizingThreads()
        self.pins = PinIds(engine)
        self._ignored: set[str] = set()
        self._followed: dict[Constraint, None] = {}
        """Forms that were asked for, all parts of which can be followed."""
        self._tools = ToolLists()

    def close(self) -> None:
        """Stop the threads that tokenise."""
        self._tokenizing.close()

    def reset(self) -> ResetReport:
        """Forget every prefix and every answer.

        Raises:
            EngineStoppedError, TimeoutError: As `Engine.reset`.
        """
        return self.engine.reset()

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""

        def write(form: AnswerForm | None) -> Format:
            name, usage_last = self.options.model_name, _usage_last(body)
            return ChatFormat(name, self.tokenizer, bool(body.logprobs), form, usage_last)

        return await self.converse(Asked(body, ignored_fields(body), write), http)

    async def converse(self, asked: Asked, http: Request) -> Response:
        """Answer a chat, whatever its dialect."""
        body, prompt = await self.prepare(asked.request, http)
        tools, constraint = tools_to_call(body), constraint_of(body)
        told = self._tools.told(body.cache_salt or "", tools) if tools else ""
        form = None
        if tools or constraint is None:  # else the answer is of that form from its first token on
            parallel = body.parallel_tool_calls is not False
            form = answer_form(
                self.tokenizer,
                prompt.text,
                prompt.opening,
                tools,
                parallel=parallel,
                shown=not body.skip_special_tokens,
            )
        bound = constrained_calls(body, self.tokenizer, prompt.opening, constraint[0] if constraint else None)
        forms = [] if constraint is None else [constraint]
        if bound is not None and bound not in (form for form, _ in forms):
            forms = [*argument_forms(body), *forms, (bound, "tools")]
        ignored = [*asked.ignored, *(asked.names.get(name, name) for name in idle_fields(body, self.tokenizer))]
        return await self._answer(body, [replace(prompt, tools=told)], asked.write(form), http, forms, ignored)

    async def prepare(self, body: ChatRequest, http: Request) -> tuple[ChatRequest, PreparedPrompt]:
        """The request with what the server adds to it, and its prompt.

        Raises:
            RequestError: See `prepare_chat`; or the client went away.
        """
        body = self._admit(body, http)
        work = partial(prepare_chat, body, self.tokenizer, self.engine.max_model_len, self.answers)
        return body, await self._tokenize(work, _size(body), body, http)

    async def tokens(self, body: ChatRequest | CompletionRequest, http: Request) -> list[int]:
        """The tokens of a request with one prompt, as the tokenizer has them.

        Raises:
            RequestError: See `prepare_chat`.
        """
        self._admit(body, http)
        longest = self.engine.max_model_len

        def work() -> list[int]:
            if isinstance(body, ChatRequest):
                prompt = prepare_chat(body, self.tokenizer, longest)
            else:
                prompt = prepare_completions(body, self.tokenizer, longest)[0]
            found: list[int] = prompt.tokens.tolist()
            return found

        return await self._tokenize(work, _size(body), body, http)

    async def text(self, tokens: list[int], http: Request) -> str:
        """The text of tokens, special ones included.

        Raises:
            RequestError: One of them is no token.
        """
        size = self.engine.model.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"{wrong} is none of the {size} tokens", "tokens", "invalid_token")
        return await self._tokenize(lambda: self.tokenizer.decode(tokens, special=True), len(tokens), None, http)

    async def complete(self, body: CompletionRequest, http: Request) -> Response:
        """Answer `POST /v1/completions`."""
        body = self._admit(body, http)
        work = partial(prepare_completions, body, self.tokenizer, self.engine.max_model_len, self.answers)
        prompts = await self._tokenize(work, _size(body), body, http)
        echoes = [(prompt.tokens.tolist(), prompt.text) for prompt in prompts] if body.echo else []
        name, scored = self.options.model_name, body.logprobs is not None
        form = CompletionFormat(name, self.tokenizer, scored, echoes, body.n or 1, _usage_last(body))
        asked = constraint_of(body)
        return await self._answer(body, prompts, form, http, [asked] if asked else [], ignored_fields(body))

    def require_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            RequestError: `name` is not that of the one that is served.
        """
        if name is not None and name != self.options.model_name:
            told = f"the model {name!r} is not served here; {self.options.model_name!r} is"
            raise RequestError(told, "model", "model_not_found")

    def _log_ignored(self, names: Sequence[str]) -> None:
        """One line for each field, when it comes for the first time."""
        new = [name for name in names if name not in self._ignored][: _MOST_IGNORED - len(self._ignored)]
        if new:
            self._ignored.update(new)
            logger.info("ignored, here and in later requests: %s", ", ".join(new))

    def _admit(self, body: BodyT, http: Request) -> BodyT:
        """Check what the options of the server have a say in; a key's own salt becomes part of the request's."""
        self.require_model(body.model)
        if isinstance(body, GenerationFields) and body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream: true", "stream_options", "invalid_value")
        if body.headway.explain and self.options.explain == "off":
            raise RequestError(
                "this server explains nothing (--explain off)", "headway.explain", "unsupported_parameter"
            )
        if self.options.salt_by_key:
            salt = hashlib.sha256(http.state.api_key.encode()).hexdigest() + (body.cache_salt or "")
            return body.model_copy(update={"cache_salt": salt})
        return body

    async def _constraint(self, forms: Sequence[tuple[Constraint, str]]) -> Constraint | None:
        """The form of an answer, compiled; other requests go on meanwhile.

        Args:
            forms: What it is made of and at last itself, each with the field that asks for it.

        Raises:
            RequestError: One of them is none, and why.
        """
        whole = forms[-1][0] if forms else None
        for constraint, name in forms[-1:] if whole in self._followed else forms:
            try:
                await asyncio.to_thread(self.engine.compile, constraint)
            except RequestError as error:
                # One with a code has another cause: another form would not help.
                raise RequestError(str(error), name, error.code or "invalid_constraint") from None
        if whole is not None:
            self._followed[whole] = None
            while len(self._followed) > _MOST_FOLLOWED:
                del self._followed[next(iter(self._followed))]
        return whole

    def _tells_in_full(self, body: ChatRequest | CompletionRequest) -> bool:
        return self.options.explain == "all" or bool(body.cache_salt)

    async def _tell(
        self,
        body: ChatRequest | CompletionRequest,
        ignored: Sequence[str],
        prompt: PreparedPrompt,
        answers: Sequence[RequestResult],
    ) -> dict[str, Any]:
        """What the client is told beside the answers to a prompt: what became of its pin, and why, if it asked."""
        told = self.pins.tell(answers)
        if ignored:
            self._log_ignored(ignored)
            told |= {"ignored": list(ignored)}
        if not body.headway.explain:
            return told
        everything, in_full = self.options.explain == "all", self._tells_in_full(body)
        text = prompt_text(body, prompt, self.tokenizer)
        work = partial(headway_report, prompt, answers[0], text, told_in_full=in_full, everything=everything)
        return await self._tokenizing.run(work, len(prompt.text), body.user or body.cache_salt or "") | told

    async def _tokenize(self, work: Callable[[], T], size: int, body: CommonFields | None, http: Request) -> T:
        """Run `work`, which tokenises `size` characters.

        Raises:
            RequestError: What `work` raises, or the client went away meanwhile.
        """
        named = "" if body is None else body.user or body.cache_salt
        client = named or (http.client.host if http.client else "")
        working = asyncio.ensure_future(self._tokenizing.run(work, size, client))
        if not await _unless_gone(working, http.receive):
            raise RequestError("the client went away while its request was tokenised")
        return working.result()

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[PreparedPrompt],
        form: Format,
        http: Request,
        forms: Sequence[tuple[Constraint, str]],
        ignored: Sequence[str],
    ) -> Response:
        constraint = await self._constraint(forms)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompts:
                requests = generation_requests(body, prompt, self.engine, constraint)
                if form.reads_special:
                    requests = [replace(request, special_shown=True) for request in requests]
                told = body.headway.explain and self._tells_in_full(body)
                requests[0] = replace(requests[0], find_displaced=told, tell_kept=form.tells_kept)  # for all answers
                handles += self.engine.submit_group(requests)
        except BaseException:
            _abort(handles)
            raise
        job = _Job(form, prompts, handles, partial(self._tell, body, ignored))
        if body.stream:
            return _EventStream(job)
        with _aborting(handles):
            if await _unless_gone(_collect(job), http.receive):
                return JSONResponse(form.whole(job.choices, await job.report()))
        return Response(status_code=499)  # nobody is there to read it


class _EventStream(Response):
    """A streamed answer, as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, job: _Job) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until all answers have ended or the client is gone."""
        with _aborting(self._job.handles):
            await _unless_gone(self._send_events(send), receive)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(_events(self._job)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": _sent(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _sent(event: Event) -> bytes:
    """An event as the stream has it."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


async def _events(job: _Job) -> AsyncGenerator[Event, None]:
    """The events of a streamed answer, or those of the error that ended it."""
    for event in job.format.opening(len(job.choices)):
        yield event
    left, events = len(job.choices), list[Event]()
    try:
        async with contextlib.aclosing(_merged(job.handles)) as deltas:
            async for index, delta in deltas:
                job.choices[index].add(delta)
                left -= delta.result is not None
                events = list(job.format.chunks(index, delta))
                for event in events if left else ():
                    yield event
        for event in job.format.closing(events, job.choices, await job.report()):
            yield event
    except HeadwayError as error:
        log_failure(error)
        for event in job.format.failed(error):
            yield event


async def _collect(job: _Job) -> None:
    async with contextlib.aclosing(_merged(job.handles)) as deltas:
        async for index, delta in deltas:
            job.choices[index].add(delta)


async def _merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several requests as they come.

    Raises:
        HeadwayError: One of the requests failed.
    """
    if len(handles) == 1:
        async for delta in handles[0]:
            yield 0, delta
        return
    news: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async for delta in handle:
                news.put_nowait((index, delta))
            news.put_nowait((index, None))
        except Exception as error:
            news.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(i, handle)) for i, handle in enumerate(handles)]
    try:
        left = len(pumps)
        while left:
            index, item = await news.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()


async def _unless_gone(work: Awaitable[object], receive: Receive) -> bool:
    """Await `work`, or stop it when the client goes away. Returns whether it was done.

    Raises:
        Exception: Whatever `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            logger.info("the client went away before its answer was complete")  # no response, so no line of access
            return False
        working.result()
        return True
    finally:
        unfinished = [task for task in (working, watching) if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _size(body: ChatRequest | CompletionRequest) -> int:
    """Characters of its prompts."""
    if isinstance(body, ChatRequest):
        return sum(len(part) for message in body.messages for part in message.parts())
    given = body.prompt
    return len(given) if isinstance(given, str) else sum(len(one) for one in given if not isinstance(one, int))


def _usage_last(body: GenerationFields) -> bool:
    """Whether the token counts of a stream are in a chunk of their own."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)


@contextlib.contextmanager
def _aborting(handles: Sequence[RequestHandle]) -> Iterator[None]:
    """End whatever of `handles` still runs when the block is left, in whatever way."""
    try:
        yield
    finally:
        _abort(handles)


def _abort(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.abort()
