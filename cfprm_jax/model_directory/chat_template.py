"""Chat templates: programs that others wrote, run here with a bound on their work and on what they print.

jinja2's sandbox keeps a template from the interpreter, but not from looping for ever or doubling a text until memory
ends. Here every iteration, call and filter, and every text and list that is made, is paid for from a budget that grows
with the conversation; what would cost more than is left ends the rendering with an error before it is done. No clock,
signal or process is involved, so a template renders or fails the same in every thread and on every machine.

What templates may use is what transformers gives them, but for recursive loops, other files, and the few filters and
methods whose cost their arguments do not bound (str.center and the like), which no published template uses.
"""

# The methods of a visitor have the names of jinja2's nodes.
# ruff: noqa: N802, N815

from __future__ import annotations

import contextvars
import functools
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# The largest published templates have a few tens of thousands of characters.
MOST_CHARACTERS = 1 << 18
# A unit is an iteration, a call, an element of a list, or a hundred characters: a microsecond at most. A published
# template takes a few hundred for a question and its system prompt.
_UNITS, _UNITS_A_CHARACTER = 200_000, 20
_CHARACTERS_A_UNIT = 100
# Beyond what the conversation has.
_MOST_PRINTED = 1 << 20
_MOST_BITS = 4096
_LARGEST_INDENT = 100

_TEXT_METHODS = (
    "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title capitalize casefold swapcase "
    "replace join find rfind index rindex count removeprefix removesuffix partition rpartition isdigit isalpha isalnum "
    "isspace isupper islower isnumeric isdecimal istitle isascii"
)
_METHODS = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"items", "keys", "values", "get"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
}
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby indent int items join last length list lower "
    "map max min reject rejectattr replace reverse safe select selectattr sort string title tojson trim unique upper "
    "wordcount"
)

_left: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("chat_template_budget", default=None)


class _TooMuchError(TemplateError):
    """The budget is spent."""


def render(
    template: Any, messages: Sequence[Mapping[str, str]], special: Mapping[str, Any], add_generation_prompt: bool
) -> str:
    """The conversation as a template writes it.

    Args:
      template: its text.
      special: names of special tokens, such as "bos_token", and their texts.

    Raises:
      UserError: the template is no text, or not a template, fails, prints or computes too much. The message says what
        is wrong, and leaves it to the caller to name the file.
    """
    if not isinstance(template, str) or not template:
        raise UserError(f"expected a text, found {type(template).__name__ if template else 'none'}")
    if len(template) > MOST_CHARACTERS:
        raise UserError(f"has {len(template):,} characters, expected at most {MOST_CHARACTERS:,}")
    size = sum(len(value) for message in messages for value in message.values())
    token = _left.set([_UNITS + _UNITS_A_CHARACTER * size])
    try:
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
                raise _TooMuchError(f"it prints more than {_MOST_PRINTED:,} characters")
            pieces.append(piece)
        return "".join(pieces)
    except RecursionError:
        raise UserError("fails: it is nested too deep, or calls itself without end") from None
    # What a program of someone else raises: jinja2's errors, and any of Python's.
    except Exception as error:
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise UserError(f"fails: {kind}{' '.join(str(error).split()) or 'without a reason'}"[:500]) from error
    finally:
        _left.reset(token)


def _charge(units: int) -> None:
    left = _left.get()
    if left is not None:
        left[0] -= units
        if left[0] < 0:
            raise _TooMuchError("it computes too much: a loop or a text that grows without end?")


def _charge_characters(count: int) -> None:
    _charge(1 + count // _CHARACTERS_A_UNIT)


def _weigh(value: Any, *, printed: bool = False) -> None:
    """Charge for going through a value as a whole; with printed, also refuse what has no text of its own."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            _charge_characters(len(one))
        elif isinstance(one, list | tuple):
            _charge(1 + len(one))
            waiting.extend(one)
        elif isinstance(one, dict):
            _charge(1 + len(one))
            waiting.extend(itertools.chain(one, one.values()))
        elif printed and not (one is None or isinstance(one, bool | int | float | range | jinja2.Undefined)):
            raise SecurityError(f"it prints a {type(one).__name__}")
        else:
            _charge(1 + (len(one) if isinstance(one, range) else 0))


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _charge(1)
        yield value


def _elements(values: Any) -> Any:
    """What a loop goes through, paid for: at once where its length is known, else one by one."""
    if isinstance(values, jinja2.Undefined):
        return values
    try:
        _charge(len(values))
    except TypeError:
        return _metered(values)
    return values


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
        self.filters = {name: _paid(name, self.filters[name]) for name in _FILTERS.split() if name != "tojson"}
        self.filters["tojson"] = _paid("tojson", _to_json)
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

    # What _Meter puts into templates.

    def concatenated(self, *values: Any) -> str:
        for value in values:
            _weigh(value, printed=True)
        return "".join(map(str, values))

    def weighed(self, value: Any) -> Any:
        _weigh(value)
        return value

    elements = staticmethod(_elements)
    charge = staticmethod(_charge)

    # What the sandbox asks.

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _charge(1)
        if isinstance(__obj, types.BuiltinMethodType):
            _check_method(__obj, args)
        args = tuple(_metered(arg) if isinstance(arg, Iterator) else arg for arg in args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | list | dict | tuple):
            _weigh(result)
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice) and isinstance(obj, str | list | tuple):
            _charge(len(obj))
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> None:
        if getattr(value, "__name__", "") in ("format", "format_map") and isinstance(value, types.BuiltinMethodType):
            raise SecurityError("str.format is not supported in chat templates")


def _check_method(method: Any, args: tuple[Any, ...]) -> None:
    owner, name = method.__self__, method.__name__
    allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"{type(owner).__name__}.{name} is not supported in chat templates")
    for value in (owner, *args):
        if not isinstance(value, Iterator):
            _weigh(value)
    if name in ("split", "rsplit", "splitlines"):
        _charge(len(owner))
    elif name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        _charge_characters((owner.count(args[0]) if args[0] else len(owner) + 1) * len(args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _charge_characters(len(args[0]) * len(owner))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Charge for the result of an operator, or refuse one that is too large to be made."""
    sequence = str | list | tuple
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(abs(right), 1)}
        if bits.get(operator, 0) > _MOST_BITS:
            raise _TooMuchError(f"{operator} makes a number of more than {_MOST_BITS} bits")
    elif operator == "*" and isinstance(left, int) and isinstance(right, sequence):
        _charge(max(left, 0) * (1 + len(right)))
    elif operator == "*" and isinstance(right, int) and isinstance(left, sequence):
        _charge(max(right, 0) * (1 + len(left)))
    elif operator == "%" and isinstance(left, str):
        if re.search(r"%[^a-zA-Z%]*(\d{3}|\*)", left):
            raise SecurityError("% with a width is not supported in chat templates")
        _weigh(left)
        _weigh(right, printed=True)
    elif operator == "+" and isinstance(left, sequence) and isinstance(right, sequence):
        for value in (left, right):
            _charge_characters(len(value)) if isinstance(value, str) else _charge(1 + len(value))


class _Meter(NodeTransformer):
    """Puts the charges for loops, macros, literals and ~ into a parsed template."""

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
    """A node whose body first pays for what it prints by itself."""
    printed = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    cost = nodes.Const(1 + printed // _CHARACTERS_A_UNIT).set_lineno(node.lineno)
    node.body.insert(0, nodes.ExprStmt(_through("charge", cost)).set_lineno(node.lineno))
    return node


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged for what it is given and what it gives."""
    # jinja2 passes an environment or a context first to functions that want one.
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def paid(*args: Any, **options: Any) -> Any:
        values = list(args)
        if len(values) > first:
            if isinstance(values[first], Iterator):
                values[first] = _metered(values[first])
                if name == "join":
                    values[first] = list(values[first])
            if not isinstance(values[first], Iterator):
                _weigh(values[first], printed=name in ("string", "tojson", "join", "trim", "e", "escape"))
        _check_filter(name, values[first:], options)
        result = function(*values, **options)
        if isinstance(result, str | list | dict | tuple):
            _weigh(result)
        return result

    return paid


def _check_filter(name: str, values: list[Any], options: dict[str, Any]) -> None:
    numbers = [v for v in (*values[1:], *options.values()) if isinstance(v, int)]
    if name in ("indent", "tojson") and any(abs(number) > _LARGEST_INDENT for number in numbers):
        raise SecurityError(f"{name} by more than {_LARGEST_INDENT} is not supported in chat templates")
    if name == "indent" and values and isinstance(values[0], str):
        width = next((v for v in (*values[1:2], options.get("width")) if v is not None), 4)
        _charge_characters((values[0].count("\n") + 1) * (len(width) if isinstance(width, str) else _LARGEST_INDENT))
    elif name == "replace" and len(values) > 2:
        text, old, new = (str(value) for value in values[:3])
        _charge_characters((text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join" and values and hasattr(values[0], "__len__"):
        separator = values[1] if len(values) > 1 else options.get("d", "")
        _charge_characters(len(values[0]) * len(str(separator)))


@jinja2.pass_context
def _printed(context: Any, value: Any) -> Any:
    """What {{ }} prints, paid for. It takes the context, so that nothing is printed at compile time."""
    _weigh(value, printed=True)
    return value


def _is_in(value: Any, values: Any) -> bool:
    return value in _elements(values)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own escapes the characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


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
    """{% generation %}: marks what an assistant wrote, for trainers; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


_ENVIRONMENT = _Environment()


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(template)
