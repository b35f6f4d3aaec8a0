"""What a request may call, and how that binds its answer."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from headway.engine.tokenizer import TextTokenizer
from headway.errors import RequestError
from headway.runtime.interface import Constraint
from headway.server.chat.conversation import plain_tool
from headway.server.chat.messages import NamedTool
from headway.server.chat.required import arguments_constraint, binds_free_calls, calls_constraint
from headway.server.constraints import constraint_of
from headway.server.protocol import ChatRequest

__all__ = ["ToolLists", "argument_forms", "constrained_calls", "idle_fields", "tools_to_call"]

_MOST_LISTS = 1024


def tools_to_call(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the answer may call, as templates get them: all, the one that is named, or none.

    Raises:
        RequestError: A call is asked for and there is no such tool, or none at all.
    """
    tools, choice = [plain_tool(tool) for tool in request.tools or ()], request.tool_choice
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"two tools have the name {twice!r}: give each its own", "tools", "invalid_value")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            told = f"tool_choice names {name!r}, and the tools are {', '.join(names) or 'none'}"
            raise RequestError(told, "tool_choice", "invalid_value")
        return [tools[names.index(name)]]
    if choice == "required" and not tools:
        raise RequestError(
            "tool_choice is required, and there are no tools: send tools", "tool_choice", "invalid_value"
        )
    return tools


def constrained_calls(
    request: ChatRequest, tokenizer: TextTokenizer, opening: str, otherwise: Constraint | None
) -> Constraint | None:
    """The form that an answer must have for its calls; None where none is asked for.

    Args:
        request: The request.
        tokenizer: The model's tokenizer.
        opening: What the chat template writes in front of the answer.
        otherwise: The form that an answer without calls must have.

    Raises:
        RequestError: A call is asked for, and it is not known how the model writes calls.
    """
    tools, forced = tools_to_call(request), _forced(request)
    otherwise = None if forced else otherwise  # it is of an answer in words, which there will not be
    strict = any(tool.function.strict for tool in request.tools or ())
    if not tools or not (forced or strict or otherwise is not None):
        return otherwise
    if otherwise is not None and otherwise.kind != "json":
        raise RequestError(
            f"with tools, an answer may fit a JSON schema and no {otherwise.kind}: send no tools", "tools"
        )
    if otherwise is not None and not _is_object(otherwise.text):
        return otherwise  # which is refused as what it is; in a grammar it could be anything
    parallel = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
    free = not forced and otherwise is None
    found = calls_constraint(tokenizer, tools, opening, parallel=parallel, otherwise=otherwise, free=free)
    if found is None and forced:
        raise RequestError(
            "it is not known how this model writes calls, so none can be asked for: use tool_choice auto, and read the "
            "answer as text",
            "tool_choice",
            "unsupported_parameter",
        )
    return found or otherwise


def _forced(request: ChatRequest) -> bool:
    return request.tool_choice not in (None, "auto", "none")


def argument_forms(request: ChatRequest) -> list[tuple[Constraint, str]]:
    """The forms of the arguments of each tool that may be called, and the fields that say so.

    Raises:
        RequestError: Arguments are no object.
    """
    called, forms = {tool["function"]["name"] for tool in tools_to_call(request)}, []
    for i, tool in enumerate(request.tools or ()):
        if tool.function.name in called:
            parameters, field = plain_tool(tool)["function"]["parameters"], f"tools[{i}].function.parameters"
            kind = parameters.get("type", "object")
            if "object" not in (kind if isinstance(kind, list) else [kind]):
                told = f"{field}: arguments are an object, and this is the schema of a {kind}"
                raise RequestError(told, field, "invalid_constraint")
            forms.append((arguments_constraint(parameters), field))
    return forms


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def idle_fields(request: ChatRequest, tokenizer: TextTokenizer) -> list[str]:
    """Fields that are known and do nothing here.

    The model cannot be told how much to think, or bound in calls; or a call is asked for, and a form of other answers.
    """
    idle, effort = [], request.reasoning_effort
    switched = effort in ("none", "minimal") and tokenizer.template_knows("enable_thinking")
    if effort is not None and not switched and not tokenizer.template_knows("reasoning_effort"):
        idle.append("reasoning_effort")
    strict = any(tool.function.strict for tool in request.tools or ())
    if strict and request.tool_choice in (None, "auto") and not binds_free_calls(tokenizer):
        idle.append("tools[].function.strict")
    if _forced(request) and (form := constraint_of(request)) is not None:
        idle.append(form[1].partition(".")[0])
    return idle


class ToolLists:
    """The tools of earlier requests, per cache salt: whether the same come in another order, or with other definitions.

    Tools are the head of a prompt: one that moves displaces all that follows. May be used by several threads.
    """

    def __init__(self, most: int = _MOST_LISTS) -> None:
        """Remember nothing yet, and at most so many lists."""
        self._most = most
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, frozenset[str]], dict[str, str]] = OrderedDict()

    def told(self, salt: str, tools: Sequence[Mapping[str, Any]]) -> str:
        """How a list differs from the last one with the same names, which it replaces; empty if it does not."""
        now = {tool["function"]["name"]: _digest(tool) for tool in tools}
        key = salt, frozenset(now)
        with self._lock:
            before = self._seen.pop(key, now)
            self._seen[key] = now
            while len(self._seen) > self._most:
                self._seen.popitem(last=False)
        changed = [name for name in now if now[name] != before[name]]
        old, new = list(before), list(now)
        moved = [name for name in new if old.index(name) != new.index(name)]
        told = []
        if moved:
            name = moved[0]
            places = f"{name} was number {old.index(name) + 1} and is number {new.index(name) + 1}"
            told.append(f"the tools stand in another order than before: {places}; send them in one order")
        if changed:
            told.append(f"the definition of {', '.join(changed)} is another than before; send it as it was")
        return "; ".join(told)


def _digest(tool: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(tool).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
