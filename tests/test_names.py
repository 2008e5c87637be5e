"""Class names have one meaning each."""

from __future__ import annotations

import ast
import collections
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "cfprm_jax"


def test_no_class_name_is_defined_in_two_modules():
    modules = collections.defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
