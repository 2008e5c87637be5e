r"""LaTeX of an answer as plain text: \frac{1}{2} is 1/2, \sqrt{x+1} is sqrt(x+1), a matrix is [ 1 2; 3 4 ].

Only what answers are made of. A command that is not known keeps its name, so that two answers which differ in it stay
different.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)

# Commands for a symbol. Greek letters are one letter each, as a variable is.
_SYMBOLS = {
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "cdot": "*",
    "times": "*",
    "ast": "*",
    "div": "/",
    "le": "≤",
    "leq": "≤",
    "ge": "≥",
    "geq": "≥",
    "neq": "≠",
    "ne": "≠",
    "pm": "±",
    "mp": "∓",
    "in": "∈",
    "cap": "∩",
    "emptyset": "∅",
    "varnothing": "∅",
    "angle": "∠",
    "circ": "∘",
    "ldots": "…",
    "dots": "…",
    "cdots": "⋯",
    "to": "→",
    "mid": "|",
    "lvert": "|",
    "rvert": "|",
    "prime": "'",
    "quad": "  ",
    "qquad": "    ",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "varepsilon": "ε",
    "zeta": "ζ",
    "eta": "η",
    "theta": "θ",
    "kappa": "κ",
    "lambda": "λ",
    "mu": "μ",
    "nu": "ν",
    "xi": "ξ",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "phi": "φ",
    "varphi": "φ",
    "chi": "χ",
    "psi": "ψ",
    "omega": "ω",
    "Gamma": "Γ",
    "Delta": "Δ",
    "Theta": "Θ",
    "Lambda": "Λ",
    "Sigma": "Σ",
    "Phi": "Φ",
    "Psi": "Ψ",
    "Omega": "Ω",
}
# Commands that only change how what follows looks.
_SILENT = re.compile(
    r"left|right|[bB]ig{1,2}[lr]?|displaystyle|textstyle|limits|text(?:bf|it|rm)?|math(?:rm|bf|it|sf|bb|cal)|operatorname|"
    r"mbox|boxed|overline"
)
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|min|max|gcd|lcm")
_SPACES = {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "\\": "; "}
_ATOM = re.compile(r"[0-9]+(?:\.[0-9]+)?|[^\W\d_]|pi|sqrt\([^()]*\)", re.UNICODE)


def plain_text(latex: str) -> str:
    """The text of a piece of LaTeX; what is no LaTeX stays as it is."""
    return _Reader(latex).text().strip()


class _Reader:
    """Reads tokens from left to right."""

    def __init__(self, latex: str) -> None:
        self._tokens = _TOKEN.findall(latex)
        self._place = 0

    def text(self, closing: str | None = None) -> str:
        """Up to the closing token, which is read too, or to the end."""
        out = []
        while self._place < len(self._tokens):
            token = self._next()
            if token == closing:
                break
            out.append(self._one(token))
        return "".join(out)

    def _next(self) -> str:
        token = self._tokens[self._place]
        self._place += 1
        return token

    def _one(self, token: str) -> str:
        if token == "{":
            return self.text("}")
        if token == "&":
            return " "
        if not token.startswith("\\") or len(token) == 1:
            return token
        name = token[1:]
        if not name.isalpha():
            return _SPACES.get(name, name)
        if name in ("frac", "dfrac", "tfrac"):
            numerator, denominator = _atom(self._argument()), _atom(self._argument())
            # The space keeps the whole part of a mixed number apart.
            return f" {numerator}/{denominator}"
        if name == "sqrt":
            return self._root()
        if name in ("begin", "end"):
            self._environment()
            return "[ " if name == "begin" else " ]"
        if _SILENT.fullmatch(name):
            return ""
        return _SYMBOLS.get(name, name if _FUNCTION.fullmatch(name) else f"\\{name} ")

    def _argument(self) -> str:
        """The next braced group, command or character."""
        self._skip_spaces()
        return self._one(self._next()).strip() if self._place < len(self._tokens) else ""

    def _root(self) -> str:
        self._skip_spaces()
        index = ""
        if self._tokens[self._place : self._place + 1] == ["["]:
            self._place += 1
            index = self.text("]").strip()
        radicand = self._argument()
        return f"({radicand})^(1/{index})" if index not in ("", "2") else f"sqrt({radicand})"

    def _environment(self) -> None:
        """Its name, and the columns of an array."""
        if self._argument() == "array" and self._tokens[self._place : self._place + 1] == ["{"]:
            self._argument()

    def _skip_spaces(self) -> None:
        while self._tokens[self._place : self._place + 1] == [" "]:
            self._place += 1


def _atom(text: str) -> str:
    """In brackets, unless it is one number, letter, root, or has brackets around it already."""
    return text if _ATOM.fullmatch(text.removeprefix("-")) else f"({text})"
