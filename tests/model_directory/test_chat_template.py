"""Chat templates: the text that transformers gives, and an end to all that has none."""

from __future__ import annotations

import datetime
import json
import threading

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import chat_template
from cfprm_jax.model_directory.chat_template import render

MESSAGES = [
    {"role": "system", "content": "Be <b>."},
    {"role": "user", "content": "What is 1+1?\n two </think> x"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = [
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ loop.length }}{{ loop.last }}{{ m['content'] | trim }}\n"
    "{% endfor %}{{ bos_token ~ eos_token }}{{ tools }}{{ unknown }}",
    "{%- macro f(x, n=1) -%}[{{ x|upper }}{{n}}]{%- endmacro -%}{{ f(messages[0].content) }}"
    "{% set ns = namespace(a=1, l=[]) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}"
    "{{ messages|tojson(indent=2) }}",
    "{% for m in messages if m.role == 'user' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% break %}"
    "{% endfor %}"
    "{{ messages[1:]|length }}{{ messages|map(attribute='role')|join(', ') }}",
    "{% set messages = [{'role':'x','content':'y'}] + messages %}{% generation %}hi{% endgeneration %}"
    "{{ messages|selectattr('role','equalto','user')|list|length }}{{ {'a':1}.items()|list }}"
    "{% for k, v in {'a': [1,(2,)]}|items %}{{k}}={{v}}{% endfor %}",
    "{{ 'a' in messages[0]['content'] }}{{ 'a' * 3 }}{{ '%s-%d' % ('x', 3) }}{{ none }}{{ 2 ** 10 }}{{ [1,2,3][::-1] }}"
    "{{ messages[0].content.replace('e','EE')|indent(4, true) }}{{ messages | last }}{{ range(3)|join('-') }}"
    "{% filter upper %}abc{% endfilter %}{% set x %}q{{ 1 }}{% endset %}{{ x }}"
    "{% if x is string and 1 is in [1,2] %}ok{% endif %}{{ y|default('d') }}{{ 'abc'|replace('b','x') }}{{ '<&>'|e }}",
    "{% if messages[0]['role'] == 'system' -%}\n  {% set loop_messages = messages[1:] %}\n{% else %}{% endif %}\n"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% endfor %}",
]


def transformers_render(template, messages=MESSAGES, add_generation_prompt=True):
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    rendered, _ = library.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=add_generation_prompt, **SPECIAL
    )
    return rendered[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_text_as_transformers(template):
    assert render(template, MESSAGES, SPECIAL, True) == transformers_render(template)


def test_the_date_is_the_same_on_every_day(monkeypatch):
    """It is that of Llama 3.2, whose template begins so, where no clock is there."""
    template = (
        "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}"
        "{%- endif %}{%- endif %}Today Date: {{ date_string }} {{ messages[0].content }}"
    )

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 1, 2, tzinfo=tz)

    for clock in (datetime.datetime, Later):
        monkeypatch.setattr(chat_template, "datetime", clock)
        assert render(template, MESSAGES, SPECIAL, True) == "Today Date: 26 Jul 2024 Be <b>."
        assert render("{{ strftime_now('%Y-%m-%d') }}", MESSAGES, SPECIAL, True) == "2024-07-26"


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_published_template_of_qwen(shared, add_generation_prompt):
    config = json.loads((shared / "data/tokenizers/qwen2.5/tokenizer_config.json").read_text())
    for messages in (MESSAGES, MESSAGES[1:], [*MESSAGES, {"role": "assistant", "content": "2"}]):
        ours = render(config["chat_template"], messages, SPECIAL, add_generation_prompt)
        assert ours == transformers_render(config["chat_template"], messages, add_generation_prompt)


def test_a_long_question_has_a_long_budget():
    long = [{"role": "user", "content": "a b\n" * 20_000}]
    template = "{% for c in messages[0].content %}{{ c }}{% endfor %}{{ messages[0].content.split(' ')|length }}"
    assert render(template, long, {}, True) == long[0]["content"] + "20001"


MANY = "{% for a in range(100000) %}"
GROWING = "{% set ns = namespace(s='aaaaaaaa', l=[1]) %}{% for a in range(60) %}"


@pytest.mark.parametrize(
    "template",
    [
        MANY * 3 + "{% endfor %}" * 3,
        "{% for a in range(100000) if false %}{% endfor %}" * 3,
        GROWING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        GROWING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        GROWING + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        GROWING + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        GROWING + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
        GROWING + "{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
        GROWING + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{% set ns = namespace(x=3) %}" + MANY + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 10 ** 1000000000 }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ range(100000)|join('a' * 1000) }}",
        "{{ ('\n' * 100000)|indent('x' * 100000) }}",
        MANY + "{{ range(100000)|sort|length }}{% endfor %}",
        MANY + "{{ dict(range(100000)|select('none')) }}{% endfor %}",
        MANY + "{{ 'a' in range(100000)|map('string') }}{% endfor %}",
        "{% set x = 'a' * 1000000 %}" + MANY + "{{ x[1:]|length }}{% endfor %}",
        "{% macro r() %}"
        + MANY
        + "{{ caller() }}{% endfor %}{% endmacro %}{% call r() %}"
        + "y" * 10_000
        + "{% endcall %}",
        MANY + "x" * 1000 + "{% endfor %}",
    ],
)
def test_what_would_not_end_or_fit_ends_with_an_error(template):
    with pytest.raises(UserError, match=r"computes too much|prints more than|more than 4096 bits"):
        render(template, MESSAGES, {}, True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (3, "expected a text, found int"),
        ({"a": 1}, "expected a text, found dict"),
        (None, "expected a text, found none"),
        ("", "expected a text, found none"),
        ("x" * 300_000, "has 300,000 characters, expected at most 262,144"),
        ("{% for %}", "fails: Expected an expression"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ 2.0 ** 5000 }}", "fails: OverflowError"),
        ("{{ 1 + 'a' }}", "fails: TypeError"),
        ("{{ a.b.c }}", "fails: 'a' is undefined"),
        ("{{ raise_exception('no system role') }}", "fails: no system role"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: it is nested too deep, or calls itself"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "fails: it is nested too deep"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "fails: SyntaxError: too many statically nested blocks"),
        (
            "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
            "fails: recursive loops are not supported",
        ),
        ("{% include 'x' %}", "fails: include needs another file"),
        ("{% import 'x' as y %}", "fails: import needs another file"),
        ("{% from 'x' import y %}", "fails: fromimport needs another file"),
        ("{% extends 'x' %}", "fails: extends needs another file"),
        ("{{ 'a'.center(10000000000) }}", "fails: str.center is not supported"),
        ("{{ 'a'|center(10000000000) }}", "fails: No filter named 'center'"),
        ("{{ '{:>10000000000}'.format(1) }}", "fails: str.format is not supported"),
        ("{{ messages|map(attribute='content')|map(attribute='format')|list }}", "fails: str.format is not supported"),
        ("{{ '%10000000000d' % 1 }}", "fails: % with a width is not supported"),
        ("{{ '%*d' % (10000000000, 1) }}", "fails: % with a width is not supported"),
        ("{{ (10).to_bytes(10000000000) }}", "fails: int.to_bytes is not supported"),
        ("{{ messages|tojson(indent=1000000000) }}", "fails: tojson by more than 100"),
        ("{{ lipsum(n=100000000) }}", "fails: 'lipsum' is undefined"),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "fails: it prints a _Namespace"),
        ("{{ namespace(__class__=1) }}", "fails: a namespace cannot have the name '__class__'"),
        ("{{ ''.__class__.__mro__ }}", "fails: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "fails: access to attribute 'append'|list.append is not supported"),
    ],
)
def test_errors_are_one_line(template, message):
    with pytest.raises(UserError, match=message) as error:
        render(template, MESSAGES, {}, True)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_budgets_are_of_one_rendering_and_one_thread():
    costly = "{% for a in range(10000) %}{% for m in messages %}{% endfor %}{% endfor %}{{ messages|length }}"
    results: list[str] = []

    def work() -> None:
        results.extend(render(costly, MESSAGES[:1], {}, True) for _ in range(2))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert results == ["1"] * 8
