r"""What the default grader takes off an answer, and what it writes otherwise, before the answer is read as LaTeX.

Each rule is for a notation that math-verify refuses or reads as something else:

* marks of Markdown, colours, "Answer:", and the signs of formulas around an answer;
* currencies and units: "5 km/h" would be 5*k*m/h, "18 cm^2" 324 centimetres. A unit is taken off a number only;
* 5e3, which would be a product with e; and 0.\overline{3}, which would be 0 times a letter with a bar;
* degrees under a trigonometric function, which would be radians;
* an inequality, where the other answer is an interval (see inequality).
"""

from __future__ import annotations

import fractions
import re

from cfprm_jax.grading.answers import bare

_COLOUR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_PREFIX = re.compile(
    r"^(?:\\text\s*\{\s*)?(?:the )?(?:final )?answer\s*(?:is\b|:|=)\s*:?\s*(?P<brace>\})?\s*", re.IGNORECASE
)
_SPACING = re.compile(r"(?<!\\)\\[,;: !]|\\quad|\\qquad|~|\\$")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_CURRENCY = re.compile(
    r"^(?P<sign>[-+]?)\s*(?:\\\$|\\pounds|\\euro|US\\?\$|[$£€¥₹₽₩¢]|(?:USD|EUR|GBP)\b)\s*(?=[-+\d.\\])"
)
_NUMBER = (
    r"[-+]?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)?\s*(?:\\[dt]?frac\s*(?:\{[^{}a-z]*\}\s*\{[^{}a-z]*\}|\d\s*\d))?"
    r"(?:\s+\d+/\d+|/\d+)?(?:\s*\\sqrt\s*(?:\[\d\]\s*)?(?:\{\d+\}|\d))?(?:\s*\\pi(?![a-zA-Z]))?"
)
_WITH_REST = re.compile(rf"^(?P<number>{_NUMBER})(?P<rest>.*)$", re.DOTALL)
# The canonical name of each unit; the names that are written are the keys.
_NAMES = {
    "m": "m meter meters metre metres",
    "cm": "cm cms centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kms kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yds yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "mg": "mg milligram milligrams",
    "kg": "kg kgs kilogram kilograms kilo kilos",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "t": "ton tons tonne tonnes",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters",
    "gal": "gal gallon gallons",
    "cup": "cup cups",
    "degree": "degree degrees deg degs",
    "rad": "radian radians rad",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "euro": "euro euros eur",
    "unit": "unit units",
    "mph": "mph",
    "km/h": "kmh kph kmph",
    "c": "c celsius °c",
    "f": "f fahrenheit",
    "k": "kelvin kelvins",
    "j": "joule joules",
    "n": "newton newtons",
    "w": "watt watts",
    "v": "volt volts",
    "hz": "hz hertz",
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_SIMPLE_UNIT = "|".join(sorted((re.escape(name) for name in _UNITS), key=len, reverse=True))
_ONE = rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?(?:{_SIMPLE_UNIT})\b\.?(?:\s*(?:\^\s*\{{?-?\d\}}?|squared|cubed))?"
_UNIT = re.compile(rf"{_ONE}(?:\s*(?:/|\\cdot|\*|per\b|-|\s)\s*{_ONE}){{0,2}}", re.IGNORECASE)
_UNIT_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([a-zA-Z ^\d]+)\}\s*\{\s*([a-zA-Z ^\d]+)\}")
_DEGREES = re.compile(r"^\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?P<scale>[CFcf](?:elsius|ahrenheit)?)?\s*\.?$")
# Words that count what a number is of: "5 apples in 3 boxes"; but not a second number, and no number's word.
_COUNTED = re.compile(
    r"^\s+[a-zA-Z]{3,}[a-zA-Z' -]*(?:\b(?:in|of|per|for|from|at|on|with|each)\s+[a-zA-Z\d' -]+)?\.?$", re.IGNORECASE
)
_FACTORS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|percent|and|or|to|mod|plus|minus|times|over|squared|cubed|halves|"
    r"half|third|thirds|quarter|quarters|less|more|than|base|choose|if|pi|sqrt|sin|cos|tan|log|inf|infinity|factorial)\b",
    re.IGNORECASE,
)
_SCIENTIFIC = re.compile(r"^([-+]?)(\d+)(?:\.(\d*))?[eE]([-+]?\d{1,2})$")
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)\s*\\(?:bar|overline|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))(?:\.\.\.|\\l?dots)?"
)
_DEGREES_OF_FUNCTION = re.compile(
    r"\\(sin|cos|tan|cot|sec|csc)\s*(?:\{|\\left\(|\()?\s*(-?\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\}|\\right\)|\))?"
)
_EMPTY = re.compile(r"\\varnothing|\\emptyset|\\O(?![a-zA-Z])|^\\\{\s*\\\}$")
_RELATION = r"(<=|>=|<|>|\\leq?(?:slant)?(?![a-z])|\\geq?(?:slant)?(?![a-z])|\\lt(?![a-z])|\\gt(?![a-z]))"
_TWO_SIDED = re.compile(rf"^([^<>]+?)\s*{_RELATION}\s*([a-zA-Z])\s*{_RELATION}\s*([^<>]+)$")
_ONE_SIDED = re.compile(rf"^([^<>]+?)\s*{_RELATION}\s*([^<>]+)$")
_MEMBER = re.compile(r"^[a-zA-Z]\s*\\in\s*(?=[\[(\\])")


def cleaned(answer: str) -> tuple[str, str | None]:
    """An answer in the notation that is read, and the unit that was taken off it, by its one name."""
    answer = bare(_COLOUR.sub("", answer))
    if prefix := _PREFIX.match(answer):
        rest = answer[prefix.end() :]
        # "\text{The answer is }5" and "\text{Answer: 5}".
        answer = rest.removesuffix("}") if "\\text" in prefix[0] and not prefix["brace"] else rest
    answer = _SPACING.sub(" ", answer).strip() if re.search(r"\d\\[,;! ]*\d", answer) is None else answer.strip()
    answer = _MEMBER.sub("", answer)
    answer = _EMPTY.sub(r"\\emptyset", answer)
    answer = _REPEATING.sub(_as_fraction, answer)
    answer = _DEGREES_OF_FUNCTION.sub(lambda m: f"\\{m[1]}({{\\frac{{{m[2]}\\pi}}{{180}}}})", answer)
    if scientific := _SCIENTIFIC.match(answer):
        answer = _decimal(*scientific.groups())
    answer, currency = _without_currency(answer)
    answer, unit = _without_unit(answer)
    return bare(answer), unit or currency


def inequality(answer: str) -> str | None:
    r"""The interval of the numbers that satisfy an inequality for one letter; None for what is no such inequality.

    x\le 3 is (-\infty,3], and 2<x\le 5 is (2,5]. Parts that "or" joins are a union.
    """
    parts = re.split(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b|\\lor|\\cup)\s*", answer)
    intervals = [_interval(part.strip()) for part in parts]
    if any(interval is None for interval in intervals) or len({interval[0] for interval in intervals if interval}) != 1:
        return None
    return "\\cup ".join(interval[1] for interval in intervals if interval)


def is_interval(answer: str) -> bool:
    """Whether an answer is written as an interval, or as a union of some."""
    parts = re.split(r"\\cup", re.sub(r"\\left|\\right", "", answer))
    return all(re.fullmatch(r"\s*[\[(][^\[\]()]+,[^,\[\]()]+[\])]\s*", part) for part in parts)


def _interval(part: str) -> tuple[str, str] | None:
    """The letter and the interval of one inequality."""
    if found := _TWO_SIDED.match(part):
        left, first, letter, second, right = found.groups()
        if _less(first) and _less(second):
            return letter, f"{'[' if _closed(first) else '('}{left},{right}{']' if _closed(second) else ')'}"
        if not _less(first) and not _less(second):
            return letter, f"{'[' if _closed(second) else '('}{right},{left}{']' if _closed(first) else ')'}"
        return None
    if found := _ONE_SIDED.match(part):
        left, relation, right = found.groups()
        if re.fullmatch("[a-zA-Z]", left) and not re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", right):
            letter, bound, less = left, right, _less(relation)
        elif re.fullmatch("[a-zA-Z]", right) and not re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", left):
            letter, bound, less = right, left, not _less(relation)
        else:
            return None
        if less:
            return letter, f"(-\\infty,{bound}{']' if _closed(relation) else ')'}"
        return letter, f"{'[' if _closed(relation) else '('}{bound},\\infty)"
    return None


def _less(relation: str) -> bool:
    return relation.startswith(("<", "\\l"))


def _closed(relation: str) -> bool:
    return relation in ("<=", ">=") or relation.startswith(("\\le", "\\ge"))


def _as_fraction(found: re.Match[str]) -> str:
    r"""A repeating decimal as \frac{p}{q}."""
    whole, fixed, repeated = found[1] or "0", found[2], found[3] or found[4]
    before, scale = int(whole + fixed), 10 ** len(fixed)
    value = fractions.Fraction(before, scale) + fractions.Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _decimal(sign: str, whole: str, decimals: str | None, exponent: str) -> str:
    digits, shift = whole + (decimals or ""), int(exponent) - len(decimals or "")
    if shift >= 0:
        return f"{sign}{digits}{'0' * shift}"
    digits = digits.rjust(1 - shift, "0")
    return f"{sign}{digits[:shift]}.{digits[shift:]}"


def _without_currency(answer: str) -> tuple[str, str | None]:
    found = _CURRENCY.match(answer)
    if found is None:
        return answer, None
    return found["sign"] + answer[found.end() :], "dollar" if "$" in found[0] else None


def _without_unit(answer: str) -> tuple[str, str | None]:
    """The number alone, and the name of its unit; other answers stay as they are."""
    plain = _TEXT.sub(r" \1", _UNIT_FRACTION.sub(r" \1/\2", _TEXT.sub(r"\1", answer)) if "frac" in answer else answer)
    found = _WITH_REST.match(plain)
    if found is None or not re.search(r"\d|\\pi", found["number"]):
        return answer, None
    number = found["number"].rstrip()
    rest = plain[len(number) :]
    if rest.strip() in ("¢", "\\cent"):
        return number, "cent"
    if rest.strip() in ("£", "€", "¥", "₹", "\\$", "$"):
        return number, None
    if degrees := _DEGREES.match(rest):
        scale = degrees["scale"]
        return number, scale[0].lower() if scale else "degree"
    unit = _UNIT.fullmatch(rest.strip())
    one_letter = re.fullmatch(r"[a-zA-Z]", rest.strip()) is not None
    # 5m may be a product; 5 m and 5\text{m} are not.
    if unit and not (one_letter and not rest[0].isspace()) and (rest[0].isspace() or len(rest.strip()) > 1):
        return number, _canonical(rest)
    if _COUNTED.match(rest) and not _FACTORS.search(rest):
        return number, None
    return answer, None


def _canonical(unit: str) -> str:
    """A unit by one name: square centimeters, cm^2 and sq cm are one."""
    text = re.sub(r"\s*\bper\b\s*", "/", unit.lower().strip().rstrip("."))
    text = re.sub(r"\b(?:square|sq\.?)\s+([a-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+([a-z]+)", r"\1^3", text)
    text = re.sub(r"\s*squared", "^2", re.sub(r"\s*cubed", "^3", text)).replace("{", "").replace("}", "")
    text = re.sub(r"[a-z]+", lambda m: _UNITS.get(m[0], m[0]), text)
    return {"mi/h": "mph"}.get(re.sub(r"[\s.]+", "", text), re.sub(r"[\s.]+", "", text))
