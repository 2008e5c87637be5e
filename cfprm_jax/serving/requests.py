"""Request bodies to frozen dataclasses: every field is validated, and unknown fields are refused.

Two forms come in. `/v1/steps` has a question and solutions as steps, which the PRM's own encoding makes tokens of. The
others have one text (or its token ids) that already has a marker after each step, as vLLM and OpenR's workers take it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import numpy as np

from cfprm_jax.serving.errors import RequestError

Json = Mapping[str, Any]

_OPENING, _CLOSING, _QUOTE = b"[{", b"]}", b'"'
_OTHERS = bytes(set(range(256)) - set(_OPENING + _CLOSING + _QUOTE))
# By byte, what it adds to the depth.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPENING)], _STEPS[list(_CLOSING)] = 1, -1
# Fields of OpenAI's and vLLM's clients that have no influence on the answer.
_IDLE = ("user", "request_id", "priority")


@dataclasses.dataclass(frozen=True)
class StepsRequest:
    """Solutions of one question as steps.

    Attributes:
      single: whether the body had "steps" of one solution, not "solutions".
      logits: whether the answer has step logits, too.
    """

    question: str
    solutions: tuple[tuple[str, ...], ...]
    single: bool
    logits: bool
    model: str | None


_TRUNCATION = ("truncate_prompt_tokens", "truncation_side")


@dataclasses.dataclass(frozen=True)
class MarkedRequest:
    """Texts, or token ids, with a marker after each step.

    Attributes:
      inputs: each a text, ids, or a conversation of (role, content) messages.
      single: whether the body had one input and no list of them.
      activation: probabilities, not logits.
      truncate: number of tokens to keep; None keeps all, -1 keeps max_length.
      keep_end: keep the last tokens instead of the first.
      add_special_tokens: whether the tokenizer puts its own around a text; None is the protocol's default.
    """

    inputs: tuple[str | tuple[int, ...] | tuple[tuple[str, str], ...], ...]
    single: bool
    activation: bool = True
    truncate: int | None = None
    keep_end: bool = False
    add_special_tokens: bool | None = None
    model: str | None = None


def decode(body: bytes, max_depth: int = 16) -> Json:
    """The JSON object of a request.

    Raises:
      RequestError: 400 for what is no JSON object, is nested too deeply, or holds NaN or half a surrogate pair.
    """
    deepest = _deepest(body)
    if deepest > max_depth:
        raise RequestError(400, f"the body is nested {deepest} deep, at most {max_depth} is allowed")
    try:
        data = json.loads(body, parse_constant=_no_number)
        json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except UnicodeError as error:
        raise RequestError(400, "the body is not Unicode text in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(400, f"the body is {_kind(data)}, expected a JSON object")
    return data


def _deepest(body: bytes) -> int:
    """How deep the brackets of a JSON text are nested; those in strings do not count.

    Whole arrays, since a body may be millions of brackets or quotes, and a client decides which.
    """
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    codes = np.frombuffer(marks, np.uint8)
    # The count of quotes so far wraps at 256, an even number.
    outside = np.cumsum(codes == ord(_QUOTE), dtype=np.uint8) % 2 == 0
    return int(np.cumsum(_STEPS[codes] * outside, dtype=np.int32).max(initial=0))


def steps_request(body: Json) -> StepsRequest:
    """The body of /v1/steps. RequestError 400 names the field that is wrong."""
    _only(body, ("question", "steps", "solutions", "logits", "model", *_IDLE))
    question = _string(body, "question")
    if ("steps" in body) == ("solutions" in body):
        raise RequestError(400, 'expected one of "steps" (a list of strings) and "solutions" (a list of such lists)')
    single = "steps" in body
    name = "steps" if single else "solutions"
    given = [body["steps"]] if single else body["solutions"]
    if not isinstance(given, list) or not given:
        raise RequestError(400, f'"solutions" is {_kind(given)}, expected a list of lists of steps', name)
    for i, steps in enumerate(given):
        where = '"steps"' if single else f'"solutions"[{i}]'
        if not isinstance(steps, list) or not steps:
            raise RequestError(400, f"{where} is {_kind(steps)}, expected a list of at least one step", name)
        for j, step in enumerate(steps):
            if not isinstance(step, str):
                raise RequestError(400, f"{where}[{j}] is {_kind(step)}, expected a string", name)
    return StepsRequest(
        question, tuple(map(tuple, given)), single, _bool(body, "logits", False), _optional_string(body, "model")
    )


def pooling_request(body: Json) -> MarkedRequest:
    """The body of vLLM's /pooling with the task token_classify."""
    fields = ("model", "input", "messages", "task", "use_activation", "activation", *_TRUNCATION)
    _only(body, (*fields, "add_special_tokens", "encoding_format", "add_generation_prompt", *_IDLE))
    for name, values in (("task", ("token_classify", None)), ("encoding_format", ("float", None))):
        if body.get(name) not in values:
            raise RequestError(400, f'"{name}" is {body[name]!r:.80}, only {values[0]!r} is served', name)
    return _marked(body)


def classify_request(body: Json) -> MarkedRequest:
    """The body of vLLM's /classify."""
    fields = ("model", "input", "messages", "activation", "use_activation", *_TRUNCATION)
    _only(body, (*fields, "add_special_tokens", "add_generation_prompt", *_IDLE))
    return _marked(body)


def value_request(body: Json) -> MarkedRequest:
    """The body of OpenR's /worker_value_inference."""
    _only(body, ("input_str", "model"))
    given = body.get("input_str")
    if not isinstance(given, str | list) or given == []:
        raise RequestError(400, f'"input_str" is {_kind(given)}, expected a string or a list of strings', "input_str")
    texts = [given] if isinstance(given, str) else given
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(400, f'"input_str"[{i}] is {_kind(text)}, expected a string', "input_str")
    return MarkedRequest(tuple(texts), isinstance(given, str), model=_optional_string(body, "model"))


def address_request(body: Json) -> str:
    """The model's name in the body of OpenR's /get_worker_address."""
    _only(body, ("model",))
    return _string(body, "model")


def _marked(body: Json) -> MarkedRequest:
    if ("input" in body) == ("messages" in body):
        raise RequestError(400, 'expected one of "input" and "messages"')
    if _bool(body, "add_generation_prompt", False):
        raise RequestError(
            400, '"add_generation_prompt" is true, but a solution ends with its last step', "add_generation_prompt"
        )
    if "activation" in body and "use_activation" in body and body["activation"] != body["use_activation"]:
        raise RequestError(400, '"activation" and "use_activation" differ: give one', "use_activation")
    activation = _bool(body, "use_activation" if "use_activation" in body else "activation", True)
    truncate = body.get("truncate_prompt_tokens")
    if truncate is not None and (type(truncate) is not int or truncate < -1 or truncate == 0):
        raise RequestError(
            400,
            f'"truncate_prompt_tokens" is {truncate!r:.80}, expected a positive number of tokens, or -1',
            "truncate_prompt_tokens",
        )
    side = body.get("truncation_side")
    if side not in ("left", "right", None):
        raise RequestError(400, f'"truncation_side" is {side!r:.80}, expected "left" or "right"', "truncation_side")
    inputs, single = (_messages(body["messages"]), True) if "messages" in body else _inputs(body["input"])
    special = None if body.get("add_special_tokens") is None else _bool(body, "add_special_tokens", True)
    return MarkedRequest(
        inputs,
        single,
        activation,
        truncate,
        keep_end=side == "left",
        add_special_tokens=special,
        model=_optional_string(body, "model"),
    )


def _inputs(given: Any) -> tuple[tuple[str | tuple[int, ...], ...], bool]:
    """A text, ids, or a list of either."""
    if isinstance(given, str):
        return (given,), True
    if isinstance(given, list) and given:
        if all(isinstance(entry, str) for entry in given):
            return tuple(given), False
        if _are_ids(given):
            return (tuple(given),), True
        if all(isinstance(entry, list) and entry and _are_ids(entry) for entry in given):
            return tuple(map(tuple, given)), False
    raise RequestError(
        400,
        f'"input" is {_kind(given)}, expected a string, a list of strings, a list of token ids, or a list of those',
        "input",
    )


def _are_ids(given: list[Any]) -> bool:
    return all(type(entry) is int for entry in given)


def _messages(given: Any) -> tuple[tuple[tuple[str, str], ...]]:
    if not isinstance(given, list) or not given:
        raise RequestError(400, f'"messages" is {_kind(given)}, expected a list of messages', "messages")
    found = []
    for i, message in enumerate(given):
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or not all(isinstance(value, str) for value in message.values())
        ):
            raise RequestError(
                400, f'"messages"[{i}] is not an object with the strings "role" and "content"', "messages"
            )
        found.append((message["role"], message["content"]))
    return (tuple(found),)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _only(body: Json, fields: Collection[str]) -> None:
    unknown = [name for name in body if name not in fields]
    if unknown:
        raise RequestError(
            400, f"unknown field {unknown[0]!r:.80}; the fields are {', '.join(sorted(fields))}", unknown[0][:80]
        )


def _string(body: Json, name: str) -> str:
    if not isinstance(body.get(name), str):
        found = _kind(body[name]) if name in body else "missing"
        raise RequestError(400, f'"{name}" is {found}, expected a string', name)
    return body[name]


def _optional_string(body: Json, name: str) -> str | None:
    return None if body.get(name) is None else _string(body, name)


def _bool(body: Json, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f'"{name}" is {_kind(value)}, expected true or false', name)
    return default if value is None else value


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, list | dict) and not value:
        return "empty"
    return {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}[type(value)]
