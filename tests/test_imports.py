"""Which package may import which: one list from low to high, and no circle.

A package imports only those before it. So nothing below the commands depends on a command or a flag, and scoring and
sampling do not depend on training. Imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

import pytest

from cfprm_jax.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOMS = (
    "runtime",
    "model_directory",
    "models",
    "data",
    "losses",
    "grading",
    "evaluation",
    "report",
    "synthetic",
    "sharding",
    "huggingface",
    "checkpoints",
    "inference",
    "benchmarks",
    "serving",
    "engines",
    "searching",
    "labelling",
    "training",
    "run",
    "planning",
    "experiments",
)
"""From low to high; CONTRIBUTING.md has the same order."""

BASE = ("errors", "options", "config")  # modules below all packages
TOP = (*COMMANDS, "flags", "__main__", "__init__")  # modules above all packages; __init__ imports when it is used
SCORING = ("inference", "grading", "evaluation", "report")
LEARNING = ("training", "run")


def imported(path: pathlib.Path) -> Iterator[str]:
    """Full names of the modules, or of what may be modules, that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(root: pathlib.Path) -> dict[str, set[str]]:
    """Module -> modules of the same folder that it imports, full names."""
    files = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    edges = {}
    for module, path in modules.items():
        found = set()
        for name in imported(path):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                found.add(target)
        edges[module] = found
    return edges


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """A circle as the modules on it, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for other in sorted(edges.get(node, ())):
                if found := visit(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := visit(node, []))), [])


def room(module: str) -> str:
    """The package of cfprm_jax that a module is in, or its own name if it is in none."""
    return module.split(".")[1] if "." in module else "__init__"


def level(name: str) -> int:
    """Place of a package or of a module outside packages: base modules below all, commands above all."""
    if name in ROOMS:
        return ROOMS.index(name)
    assert name in BASE or name in TOP, f"{name} has no place: name it in ROOMS, from low to high"
    return BASE.index(name) - len(BASE) if name in BASE else len(ROOMS)


def test_a_package_imports_only_those_before_it() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in sorted(graph(ROOT / "cfprm_jax").items())
        for target in sorted(targets)
        if room(module) != room(target) and level(room(target)) >= level(room(module)) and room(module) not in TOP
        if target != "cfprm_jax"  # which every import runs, and which imports nothing itself
    ]
    assert not wrong


def test_commands_do_not_import_each_other() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph(ROOT / "cfprm_jax").items()
        for target in targets
        if room(module) in COMMANDS and room(target) in COMMANDS
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["cfprm_jax", "bench"])
def test_no_module_imports_itself_by_a_detour(folder) -> None:
    edges = graph(ROOT / folder)
    if folder == "bench":  # scripts, which find each other beside them
        names = {module.removeprefix("bench."): module for module in edges}
        for short, module in names.items():
            found = imported(ROOT / "bench" / f"{short}.py")
            edges[module] |= {names[part] for name in found if (part := name.split(".")[0]) in names}
    assert not circle(edges)


def test_contributing_has_the_same_order() -> None:
    table = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [name for cell in table for name in re.findall(r"`(\w+)/`", cell)]
    assert tuple(named) == ROOMS


LOADED = """
import importlib, json, os, sys
# Libraries are loaded once for all packages.
import flax.nnx, grain, jax, jax.experimental.pallas, optax, orbax.checkpoint, scipy.stats, tensorboardX, transformers
import jax.experimental.pallas.mosaic_gpu, jax.experimental.pallas.tpu, jax.experimental.pallas.triton

for room, modules in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            assert not any(name.startswith("cfprm_jax") for name in sys.modules)
            for module in modules:
                importlib.import_module(module)
            print(json.dumps([room, [name for name in sys.modules if name.startswith("cfprm_jax.")]]), flush=True)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, room
"""


def test_what_scores_loads_nothing_that_trains() -> None:
    """All modules of each package that scores in a process of its own, which has none of cfprm_jax before."""
    modules = graph(ROOT / "cfprm_jax")
    modules_of = {name: sorted(m for m in modules if room(m) == name) for name in SCORING}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED, json.dumps(modules_of)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = dict(json.loads(line) for line in done.stdout.splitlines())
    assert list(loaded) == list(SCORING)
    for name, modules in loaded.items():
        assert set(modules_of[name]) <= set(modules)
        above = {module for module in modules if level(room(module)) > level(name)}
        assert not above, name
        assert not {room(module) for module in modules} & set(LEARNING)


def test_what_the_package_offers_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, cfprm_jax; assert 'jax' not in sys.modules; "
        "print(cfprm_jax.load, cfprm_jax.losses.q_ranking, cfprm_jax.data.read, sorted(cfprm_jax.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
