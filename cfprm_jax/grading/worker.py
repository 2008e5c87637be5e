"""A process that compares answers for a grader, and may be killed while it does.

Reads a JSON array [predicted, reference] a line, and writes true, false, or the reason why there is no verdict, a line.
It gives itself a limit of processor time a pair, and of memory; beyond the first the system ends it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Callable

RULES = {"math_verify": "cfprm_jax.grading.math_verify_rules", "prm800k": "cfprm_jax.grading.prm800k_rules"}
_MEMORY = 2 << 30


def main(grader: str, seconds: float) -> None:
    """Answer until the input ends."""
    equal = importlib.import_module(RULES[grader]).equal
    equal("\\frac{1}{2}+x", "x+0.25")  # imports what the first comparison would wait for
    replies = sys.stdout
    # What a library prints is no reply.
    with contextlib.redirect_stdout(sys.stderr):
        more_time = _limit_resources(seconds)
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            more_time()
            try:
                reply: bool | str = equal(*json.loads(line))
            except Exception as error:
                reply = f"{type(error).__name__}: {error!s:.200}"
            print(json.dumps(reply), file=replies, flush=True)


def _limit_resources(seconds: float) -> Callable[[], None]:
    """Limit memory; what is returned gives the process so many seconds of processor time from then on."""
    try:
        import resource
    except ImportError:  # no Unix: only the parent's clock stops a pair
        return lambda: None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))

    def more_time() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard_time = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(used.ru_utime + used.ru_stime + seconds)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_time))

    return more_time
