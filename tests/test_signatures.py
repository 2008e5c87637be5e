"""Functions with many arguments take most of them by name."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parent.parent / "cfprm_jax"
MOST_POSITIONAL = 5
# jax.custom_vjp passes the arguments of these by position.
EXCEPTIONS = {"models/attention/pallas.py:_flash", "models/attention/pallas.py:_flash_forward"}


def positional(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and number of positional parameters of each function and method; functions inside functions are not among
    them, since kernels and callbacks have the signatures of their callers."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, len(node.args.posonlyargs) + len(node.args.args)
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    static = any(ast.unparse(decorator) == "staticmethod" for decorator in method.decorator_list)
                    count = len(method.args.posonlyargs) + len(method.args.args) - (not static)
                    yield f"{node.name}.{method.name}", count


def test_at_most_five_parameters_are_positional() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for name, count in positional(ast.parse(path.read_text(encoding="utf-8"))):
            if count > MOST_POSITIONAL:
                found[f"{path.relative_to(PACKAGE).as_posix()}:{name}"] = count
    assert set(found) == EXCEPTIONS, found
