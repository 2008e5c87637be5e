"""Rollouts of prefixes: taken from the log of what was done, or sampled, graded and logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cfprm_jax.data.candidates import Candidate
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.engines.engine import Engine, PrefixEncoder
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import Grader
from cfprm_jax.inference.candidates import Completion
from cfprm_jax.inference.sampler import Prompt
from cfprm_jax.labelling.rollouts import Outcome, Prefix, Rollout
from cfprm_jax.labelling.rounds import Wanted, in_tree_order
from cfprm_jax.runtime import digests

# Rollouts after which the share of cut ones is looked at, before the end.
_EARLY = 64

Pieces = Callable[[str], list[str]]
"""The steps of a continuation."""


@dataclasses.dataclass
class RolloutTotals:
    """Totals for label.json, over this run and those that it continues.

    Attributes:
      prefixes, rollouts, tokens, cut: of all outcomes.
      without_verdict: rollouts that leave n, since the grader ran out of time.
      too_long: prefixes that leave no room for a rollout.
    """

    prefixes: int = 0
    rollouts: int = 0
    tokens: int = 0
    cut: int = 0
    without_verdict: int = 0
    too_long: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.prefixes += 1
        self.rollouts += len(outcome.rollouts)
        self.too_long += not outcome.rollouts
        self.tokens += sum(rollout.tokens for rollout in outcome.rollouts)
        self.cut += sum(rollout.cut for rollout in outcome.rollouts)
        self.without_verdict += sum(rollout.correct is None for rollout in outcome.rollouts)

    def check(self, most: float, last: bool) -> None:
        """Stop where too many rollouts are cut.

        Raises:
          UserError: with the advice to allow longer ones.
        """
        if self.rollouts and (last or self.rollouts >= _EARLY) and self.cut > most * self.rollouts:
            raise UserError(
                f"{self.cut:,} of {self.rollouts:,} rollouts were cut at --max_new_tokens, more than --max_truncated="
                f"{most:g}: they count as failures, so labels would be too low; raise --max_new_tokens"
            )


class Ledger:
    """Outcomes by prefix.

    Attributes:
      counts: of the outcomes that were used.
    """

    def __init__(
        self,
        done: Iterable[dict[str, Any]],
        write: Callable[[dict[str, Any]], object],
        *,
        encoder: PrefixEncoder,
        engine: Engine,
        grader: Grader,
        rollouts: int,
        join: Callable[[Prefix], str],
        pieces: Pieces,
        keep_texts: bool,
    ) -> None:
        """A ledger.

        Args:
          done: rows that were logged before.
          write: logs a row.
          join: the text that a policy has written when it continues a prefix.
        """
        self._held = {row["name"]: row for row in done}
        self._write, self._encoder, self._engine, self._grader = write, encoder, engine, grader
        self._rollouts, self._join, self._pieces, self._keep_texts = rollouts, join, pieces, keep_texts
        self._used: set[str] = set()
        self.counts = RolloutTotals()

    def roll(
        self, questions: Sequence[QuestionRow], wanted: Sequence[Wanted], report: Callable[[], None]
    ) -> Iterator[tuple[Wanted, Outcome]]:
        """The outcomes of prefixes; those that the engine cannot give now are missing."""
        new: list[tuple[Wanted, Prompt, str]] = []
        for one in wanted:
            question, text = questions[one[0]], self._join(one[1])
            name = f"{question.name}\n{digests.of_text(text)}"
            if name in self._held:
                yield one, self._used_outcome(name)
                continue
            tokens = self._encoder.encode(question.question, text)
            if tokens is None:
                self._log(name, question, one[1], Outcome(()))
                yield one, self._used_outcome(name)
            else:
                new.append((one, Prompt(name, tokens), text))
        # Neighbours share prefixes, which the sampler computes once.
        new = [new[place] for place in in_tree_order([tuple(prompt.tokens.tolist()) for _, prompt, _ in new])]
        prompts = [prompt for _, prompt, _ in new]
        for place, completions in self._engine.complete(prompts, self._rollouts, report):
            one, prompt, text = new[place]
            question = questions[one[0]]
            self._log(prompt.name, question, one[1], self._graded(question, text, completions))
            yield one, self._used_outcome(prompt.name)

    def _graded(self, question: QuestionRow, text: str, completions: Sequence[Completion]) -> Outcome:
        whole = [Candidate(text=text + made.text) for made in completions]
        verdicts = self._grader.verdicts((candidate, question.answer, question.dataset) for candidate in whole)
        return Outcome(
            tuple(
                Rollout(
                    False if made.finish == "length" else verdict,
                    made.tokens,
                    made.finish == "length",
                    len(self._pieces(made.text)),
                    made.text if self._keep_texts else None,
                )
                for made, verdict in zip(completions, verdicts, strict=True)
            )
        )

    def _log(self, name: str, question: QuestionRow, prefix: Prefix, outcome: Outcome) -> None:
        rollouts = outcome.rollouts
        dataset = {} if question.dataset is None else {"dataset": question.dataset}
        texts = {"texts": [rollout.text for rollout in rollouts]} if self._keep_texts else {}
        row = {
            "name": name,
            "id": question.id,
            **dataset,
            "prefix_steps": len(prefix),
            "correct": [rollout.correct for rollout in rollouts],
            "tokens": [rollout.tokens for rollout in rollouts],
            "cut": [rollout.cut for rollout in rollouts],
            "steps": [rollout.steps for rollout in rollouts],
            **texts,
        }
        self._write(row)
        self._held[name] = row

    def _used_outcome(self, name: str) -> Outcome:
        row = self._held[name]
        texts = row.get("texts") or [None] * len(row["correct"])
        columns = zip(row["correct"], row["tokens"], row["cut"], row["steps"], texts, strict=True)
        outcome = Outcome(tuple(Rollout(*column) for column in columns))
        if name not in self._used:
            self._used.add(name)
            self.counts.add(outcome)
        return outcome
