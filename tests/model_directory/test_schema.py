"""The language of field types: each kind's bounds, and that the first fault is named by its place."""

from __future__ import annotations

import dataclasses

import pytest

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import file_schemas, schema
from cfprm_jax.options import option


def fault_of(kind, value):
    fault = kind.fault(value, "x")
    return None if fault is None else str(fault)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (schema.whole(1, 4), [1, 4], [0, 5, 1.0, True, "1", None, [1]]),
        (schema.number(0, 1, above=True), [1, 0.5, 1e-300], [0, 0.0, 1.1, float("inf"), float("nan"), True, "1"]),
        (schema.number(0, 1), [0, 1], [-1e-9, 10**400]),
        (schema.text(3), ["", "abc"], ["abcd", 1, None]),
        (schema.text(empty=False), ["a"], [""]),
        (schema.BOOLEAN, [True, False], [0, 1, "true", None]),
        (schema.one_of("a", 1), ["a", 1], [True, 1.0, "b"]),
        (schema.either(schema.TEXT, schema.whole(0, 9)), ["a", 3], [10, None]),
        (schema.list_of(schema.TEXT, 1, 2), [["a"], ["a", "b"]], [[], ["a"] * 3, "a", ("a",)]),
        (schema.mapping(schema.TEXT), [{}, {"a": "b"}], [[], {"a": 1}]),
        (schema.record({"a": schema.optional(schema.TEXT)}, closed=True), [{}, {"a": None}], [{"b": 1}, {"a": 1}]),
        (schema.record({"a": schema.required(schema.TEXT)}), [{"a": "x", "b": 1}], [{}, {"a": None}, 3]),
        (schema.record({"a": schema.may_lack(schema.TEXT)}), [{}, {"a": ""}], [{"a": None}]),
    ],
)
def test_kinds(kind, good, bad):
    assert [fault_of(kind, value) for value in good] == [None] * len(good)
    assert all(fault_of(kind, value) for value in bad)


def test_the_place_of_a_fault():
    fields = {"a": schema.required(schema.mapping(schema.list_of(schema.whole(0, 9))))}
    with pytest.raises(UserError, match=r"^file.json: a.b\[2\]: expected a whole number from 0 up to 9, found 'z'$"):
        schema.check({"a": {"b": [1, 2, "z"]}}, fields, "file.json")
    deep = schema.record(fields)
    assert fault_of(schema.either(schema.TEXT, deep), {"a": {"b": [11]}}) == (
        "x.a.b[0]: expected a whole number from 0 up to 9, found 11"
    )
    with pytest.raises(UserError, match=r"^the whole: expected an object, found 3$"):
        schema.check(3, {})


def test_what_is_shown_is_short():
    assert len(schema.shown("x" * 1000)) < 80
    assert len(schema.shown([[1] * 100] * 100)) < 80
    assert schema.shown(10**5000) == "int"
    assert schema.shown(schema.NOTHING) == "nothing"


def test_options_become_kinds():
    @dataclasses.dataclass
    class Options:
        count: int = option(3, "", lower=1, upper=9)
        free: int = option(3, "")
        share: float = option(0.5, "", lower=0.0, upper=1.0)
        name: str = option("a", "", choices=("a", "b"))
        flag: bool = option(True, "")

    kind = schema.of_options(Options, needed=("name",))
    assert fault_of(kind, {"name": "a"}) is None
    assert fault_of(kind, dataclasses.asdict(Options())) is None
    for change in ({"count": 10}, {"free": 2**31}, {"share": 2}, {"name": "c"}, {"flag": 1}, {"other": 1}):
        assert fault_of(kind, {"name": "a", **change})
    assert "x.name" in fault_of(kind, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 0}, "encoding.max_length: expected a whole number from 8 .*, found 0"),
        ({"max_length": -5}, "encoding.max_length: .* found -5"),
        ({"max_length": True}, "encoding.max_length: .* found true"),
        ({"max_length": "4096"}, "encoding.max_length: .* found '4096'"),
        ({"max_length": 1e9}, "encoding.max_length: .* found 1000000000.0"),
        ({"system_prompt": 3}, "encoding.system_prompt: expected a text, found 3"),
        ({"system_prompt": None}, "encoding.system_prompt: expected a text, found null"),
        ({"marker": ""}, "encoding.marker: expected a text that is not empty"),
        ({"heard": 1}, "encoding.heard: expected only max_length"),
    ],
)
def test_the_encoding_of_a_prm(change, message):
    described = {"head": "linear", "encoding": dataclasses.asdict(EncodingConfig())}
    schema.check(described, file_schemas.PRM)
    described["encoding"] |= change
    with pytest.raises(UserError, match=message):
        schema.check(described, file_schemas.PRM)
