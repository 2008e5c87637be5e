"""Rendering of chat templates: untrusted programs, with a bound on their work and on their output.

jinja2's sandbox keeps a template from the interpreter, but not from endless loops or from doubling a text until memory
ends. Here every iteration, call and filter, and every text and list that is made, is charged to a budget that grows
with the conversation (:mod:`.template_budget`); what would cost more than is left is an error.

Templates may use what transformers provides, except recursive loops, other files, and the few filters and methods
whose cost their arguments do not bound (str.center and the like), which no published template uses.
"""

# The methods of a visitor have the names of jinja2's nodes.
# ruff: noqa: N802, N815

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import template_budget as budget

# The largest published templates have a few tens of thousands of characters.
MOST_CHARACTERS = 1 << 18
# The date of templates that print today's: tokens would differ from day to day, between training and scoring and
# between a request and its completion. It is the one that Llama 3.2's template has where it is told none.
_DATE = datetime(2024, 7, 26)
# Beyond the characters of the conversation.
_MOST_PRINTED = 1 << 20

_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby indent int items join last length list lower "
    "map max min reject rejectattr replace reverse safe select selectattr sort string title tojson trim unique upper "
    "wordcount"
)


def render(
    template: Any, messages: Sequence[Mapping[str, str]], special: Mapping[str, Any], add_generation_prompt: bool
) -> str:
    """Render a conversation.

    Args:
      template: text of the template.
      special: names of special tokens, such as "bos_token", and their texts.

    Raises:
      UserError: the template is no text, or not a template, fails, prints or computes too much. The caller adds the
        name of the file to the message.
    """
    if not isinstance(template, str) or not template:
        raise UserError(f"expected a text, found {type(template).__name__ if template else 'none'}")
    if len(template) > MOST_CHARACTERS:
        raise UserError(f"has {len(template):,} characters, expected at most {MOST_CHARACTERS:,}")
    size = sum(len(value) for message in messages for value in message.values())
    try:
        with budget.limited(size):
            stream = _compiled(template).generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{name: str(value) for name, value in special.items() if value is not None},
            )
            pieces, printed = [], 0
            for piece in stream:
                printed += len(piece)
                if printed > _MOST_PRINTED + 10 * size:
                    raise budget.TooMuchError(f"it prints more than {_MOST_PRINTED:,} characters")
                pieces.append(piece)
            return "".join(pieces)
    except RecursionError:
        raise UserError("fails: it is nested too deep, or calls itself without end") from None
    # A template may raise jinja2's errors, and any of Python's.
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"fails: {kind}{' '.join(str(error).split()) or 'without a reason'}"[:500]) from error


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Constants would be computed at compile time, outside of the budget.
            optimized=False,
            finalize=_printed,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.filters = {name: budget.paid(name, self.filters[name]) for name in _FILTERS.split() if name != "tojson"}
        self.filters["tojson"] = budget.paid("tojson", _to_json)
        self.tests["in"] = _is_in
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": _Dict(),
        }
        del self.globals["lipsum"]

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Meter().visit(source), *args, **options)

    # Calls that _Meter inserts into templates.

    def concatenated(self, *values: Any) -> str:
        for value in values:
            budget.weigh(value, printed=True)
        return "".join(map(str, values))

    def weighed(self, value: Any) -> Any:
        budget.weigh(value)
        return value

    elements = staticmethod(budget.elements)
    charge = staticmethod(budget.charge)

    # Hooks of the sandbox.

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget.charge(1)
        if isinstance(__obj, types.BuiltinMethodType):
            budget.check_method(__obj, args)
        args = tuple(budget.metered(arg) if isinstance(arg, Iterator) else arg for arg in args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | dict | tuple):
            budget.weigh(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget.check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice) and isinstance(obj, str | list | tuple):
            budget.charge(len(obj))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> None:
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(value, types.BuiltinMethodType):
            raise SecurityError("str.format is not supported in chat templates")


class _Meter(NodeTransformer):
    """Inserts the charges for loops, macros, literals and ~ into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not supported in chat templates", node.lineno)
        self.generic_visit(node)
        node.iter = _through("elements", node.iter)
        return _charged(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return _charged(self.generic_visit(node))

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through("concatenated", *node.nodes)

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _through("weighed", node) if getattr(node, "ctx", "load") == "load" else node

    visit_Tuple = visit_Dict = visit_List

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = _through("elements", node.expr)
        return node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        name = type(node).__name__.lower()
        raise TemplateSyntaxError(f"{name} needs another file, and a chat template is one by itself", node.lineno)

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _through(method: str, *arguments: Any) -> Any:
    call = nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)
    return call.set_lineno(arguments[0].lineno)


def _charged(node: Any) -> nodes.Node:
    """A node whose body begins with the charge for its own literal text."""
    printed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    cost = nodes.Const(1 + printed // budget.CHARACTERS_A_UNIT).set_lineno(node.lineno)
    node.body.insert(0, nodes.ExprStmt(_through("charge", cost)).set_lineno(node.lineno))
    return node


@jinja2.pass_context
def _printed(context: Any, value: Any) -> Any:
    """Charge for what {{ }} prints. It takes the context, so that nothing is printed at compile time."""
    budget.weigh(value, printed=True)
    return value


def _is_in(value: Any, values: Any) -> bool:
    return value in budget.elements(values)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own escapes the characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return _DATE.strftime(format)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach the interpreter."""

    def __init__(*args: Any, **attributes: Any) -> None:
        given = dict(*args[1:], **attributes)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the name {name!r}")


class _Dict:
    """dict without its other attributes."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for trainers; rendering keeps its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_ENVIRONMENT = _Environment()


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)
