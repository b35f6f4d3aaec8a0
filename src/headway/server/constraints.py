"""The forms that clients ask answers to have: OpenAI's `response_format`, and the fields of vLLM for the same.

JSON Schema lets an object have properties that the schema does not name, unless it says otherwise. Few who write one
mean that, and a model that may go on inventing properties does so without end. So objects get only what is named, as
with vLLM: whatever fits the closed schema fits the given one too.
"""

from __future__ import annotations

import json
from typing import Any

from headway.errors import RequestError
from headway.runtime.interface import Constraint
from headway.server.protocol import GenerationFields, StructuredOutputs

__all__ = ["closed", "constraint_of"]

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_COMPACT = {"whitespace_flexible": False}
"""What llguidance reads in a schema, as `x-guidance`: nothing between the tokens of JSON."""
_MERGING = frozenset({"allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"})
"""Keywords by which several schemas say of one object which properties it has: each must leave the others' open."""
_BESIDE = frozenset({"anyOf", "oneOf", "$ref"})
"""The same, where they stand beside properties."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""
_OPEN = frozenset({"additionalProperties", "patternProperties", "propertyNames", "minProperties"})
"""Keywords that say something of properties without a name."""


def constraint_of(request: GenerationFields) -> tuple[Constraint, str] | None:
    """The form that a request asks for, and the field that says so; None where it asks for none.

    Raises:
        RequestError: It asks for several.
    """
    asked = [*_of_format(request), *_of_vllm(request)]
    if len(asked) > 1:
        names = " and ".join(name for _, name in asked)
        raise RequestError(f"{names} both say what form the answer has; send one of them", asked[1][1], "invalid_value")
    return asked[0] if asked else None


def _of_format(request: GenerationFields) -> list[tuple[Constraint, str]]:
    form, name = request.response_format, "response_format"
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [(_json(_ANY_OBJECT), name)]
    if form.json_schema is None:
        raise RequestError("response_format.json_schema is missing", "response_format.json_schema", "invalid_value")
    return [(_json(form.json_schema.schema_), "response_format.json_schema.schema")]


def _of_vllm(request: GenerationFields) -> list[tuple[Constraint, str]]:
    asked = []
    if request.structured_outputs is not None:
        asked += _forms(request.structured_outputs, "structured_outputs.")
        if not asked:
            raise RequestError(
                "structured_outputs says no form: give it json, json_object, regex, choice or grammar",
                "structured_outputs",
                "invalid_value",
            )
    guided = StructuredOutputs.model_construct(
        json_=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    return asked + _forms(guided, "guided_")


def _forms(given: StructuredOutputs, prefix: str) -> list[tuple[Constraint, str]]:
    asked = []
    compact = given.disable_any_whitespace
    if given.json_ is not None:
        asked.append((_json(given.json_, compact=compact), f"{prefix}json"))
    if given.json_object:
        asked.append((_json(_ANY_OBJECT, compact=compact), f"{prefix}json_object"))
    if given.regex is not None:
        asked.append((Constraint("regex", given.regex), f"{prefix}regex"))
    if given.choice is not None:
        asked.append((Constraint("choice", json.dumps(given.choice)), f"{prefix}choice"))
    if given.grammar is not None:
        asked.append((Constraint("grammar", given.grammar), f"{prefix}grammar"))
    return asked


def _json(schema: Any, *, compact: bool = False) -> Constraint:
    """A schema as one text; one that is no JSON is told when it is compiled."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            return Constraint("json", schema)
    schema = {} if schema is True else schema
    schema = closed(schema)
    if compact and isinstance(schema, dict):
        schema = schema | {"x-guidance": _COMPACT}
    return Constraint("json", json.dumps(schema, separators=(",", ":")))


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others, where it leaves that open.

    One whose parts are merged is returned as it is.
    """
    try:
        return schema if _merges(schema) else _with_closed_objects(schema)
    except RecursionError:  # the compiler says what is wrong with it
        return schema


def _merges(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_merges, schema))
    if not isinstance(schema, dict):
        return False
    keys = schema.keys()
    beside = "properties" in keys and bool(_BESIDE & keys)
    return beside or bool(_MERGING & keys) or any(map(_merges, schema.values()))


def _with_closed_objects(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_closed_objects(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _with_closed_objects(one) for name, one in value.items()}
        else:
            found[key] = value if key in _DATA else _with_closed_objects(value)
    named, required = schema.get("properties"), schema.get("required", [])
    if isinstance(named, dict) and isinstance(required, list) and not _OPEN & schema.keys():
        unnamed = [name for name in required if not isinstance(name, str) or name not in named]
        found |= {} if unnamed else {"additionalProperties": False}
    return found
