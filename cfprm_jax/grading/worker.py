"""A process that compares answers for a grader, and may be killed while it does.

Reads a JSON array [predicted, reference] a line, and writes true, false, or the reason why there is no verdict, a line.
It gives itself a limit of processor time a pair, and of memory; beyond the first the system ends it. Whatever stands in
an answer, the process does not evaluate text, write files, start programs or use the network from then on: no rules
need that, and no library of theirs should. A comparison that would do it has no verdict.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

RULES = {"math_verify": "cfprm_jax.grading.math_verify_rules", "prm800k": "cfprm_jax.grading.prm800k_rules"}
_MEMORY = 2 << 30
_OPEN_FILES = 64
_WARM_UP = ("\\frac{1}{2}+x", "x+0.25")
# These run code that is no answer's: the import system, makers of classes, and sympy's arithmetic of monomials, which
# it makes for a number of variables.
_MAY_RUN_CODE = frozenset(
    {
        *("_frozen_importlib", "importlib._bootstrap", "importlib._bootstrap_external"),
        *("dataclasses", "collections", "typing", "sympy.polys.monomials"),
    }
)
_REFUSED = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "subprocess.",
    "socket.",
    "ctypes.dlopen",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(BaseException):
    """A comparison was about to do what answers have no need of. No library's "except Exception" goes past it."""


def main(grader: str, seconds: float) -> None:
    """Answer until the input ends."""
    equal = importlib.import_module(RULES[grader]).equal
    equal(*_WARM_UP)  # imports what the first comparison would wait for
    importlib.import_module("sympy.physics.units")  # simplify imports it, which evaluates the names of units
    replies = sys.stdout
    # What a library prints is no reply.
    with contextlib.redirect_stdout(sys.stderr):
        more_time = _limit_resources(seconds)
        sys.dont_write_bytecode = True
        sys.addaudithook(_refuse)
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            more_time()
            try:
                reply: bool | str = equal(*json.loads(line))
            except (Exception, Refused) as error:
                reply = f"{type(error).__name__}: {error!s:.200}"
            print(json.dumps(reply), file=replies, flush=True)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook of Python's: raises before the event takes place.

    Raises:
      Refused: the event is the evaluation of text, the opening of a file to write, or the start of a program.
    """
    if event == "exec":
        if sys._getframe(1).f_globals.get("__name__") not in _MAY_RUN_CODE:
            raise Refused("evaluation of text")
    elif event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & _WRITES:
            raise Refused(f"opening of a file to write: {arguments[0]!r}")
    elif event.startswith(_REFUSED):
        raise Refused(event)


def _limit_resources(seconds: float) -> Callable[[], None]:
    """Limit memory, files and processes; what is returned gives a number of seconds of processor time from then on."""
    try:
        import resource
    except ImportError:  # no Unix: only the parent's clock stops a pair
        return lambda: None
    # No files are written, and no processes started (which the system does not count for the superuser).
    limits = {"AS": _MEMORY, "FSIZE": 0, "NPROC": 0, "NOFILE": _OPEN_FILES, "CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        with contextlib.suppress(ValueError, OSError):
            if kind is not None:
                _, hard = resource.getrlimit(kind)
                limit = most if hard < 0 else min(most, hard)
                # The hard limit of memory stays, as some systems count what is there already.
                resource.setrlimit(kind, (limit, hard if name == "AS" else limit))

    def more_time() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard_time = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_time))

    return more_time
