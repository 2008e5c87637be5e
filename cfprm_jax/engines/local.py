"""The policy on the devices of this process: see :mod:`cfprm_jax.inference.sampler`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cfprm_jax.engines.engine import EngineCounts
from cfprm_jax.inference.candidates import Completion, completions
from cfprm_jax.inference.policy import Policy
from cfprm_jax.inference.sampler import Prompt, Sampler


class LocalEngine:
    """An engine around a sampler; prompts are completed in order."""

    def __init__(self, name: str, policy: Policy, sampler: Sampler) -> None:
        """An engine with the name of the policy."""
        self.name, self.counts = name, EngineCounts(prefilled=0, padding=0)
        self.sampler, self._policy = sampler, policy

    def complete(
        self, prompts: Sequence[Prompt], number: int, report: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, list[Completion]]]:
        """See :class:`~cfprm_jax.engines.engine.Engine`."""

        def counted() -> None:
            done, counts = self.sampler.counts, self.counts
            counts.completions, counts.tokens, counts.live = done.candidates, done.tokens, done.live
            counts.prefilled, counts.padding = done.prefilled, done.padding
            report()

        for place, found in enumerate(self.sampler.sample(prompts, number, counted)):
            self.counts.prompt_tokens += number * len(prompts[place].tokens)
            yield place, completions(self._policy, found)
        counted()
