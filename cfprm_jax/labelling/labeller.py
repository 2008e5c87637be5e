"""The rows of a run of `label`: questions in, rollouts in rounds, rows out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cfprm_jax.data.steps import split_steps
from cfprm_jax.engines import options as engines
from cfprm_jax.engines.engine import Engine, PrefixEncoder
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import Grader
from cfprm_jax.labelling import first_error
from cfprm_jax.labelling import rows as row_forms
from cfprm_jax.labelling.inputs import InputSolution, Labelled, read_questions, read_solutions, with_correctness
from cfprm_jax.labelling.ledger import Ledger
from cfprm_jax.labelling.options import LabelConfig
from cfprm_jax.labelling.rollouts import Method, Outcome, Prefix
from cfprm_jax.labelling.rounds import Rounds
from cfprm_jax.labelling.summary import Summary
from cfprm_jax.labelling.tree import Cut, SearchTree, TreeSettings, search
from cfprm_jax.runtime import shards
from cfprm_jax.runtime.progress import ProgressLine


class BadRows:
    """Counts malformed rows of the input, which are skipped, up to a most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.skipped: list[str] = []

    def __call__(self, error: str) -> None:
        """Skip a row with this error, or raise it."""
        if len(self.skipped) >= self._most:
            allowed = f" (after {self._most} that --max_bad_rows allows)" if self._most else ""
            raise UserError(f"{error}{allowed}")
        self.skipped.append(error)


class Labeller:
    """The rows of one run.

    Attributes:
      summary: totals so far.
      ledger: every prefix that was rolled.
    """

    def __init__(
        self,
        config: LabelConfig,
        opened: engines.Opened,
        grader: Grader,
        *,
        done: Iterable[dict[str, Any]],
        write: Callable[[dict[str, Any]], object],
    ) -> None:
        self._config, self._grader = config, grader
        self._engine: Engine = opened.engine
        room = opened.longest[0] - config.max_new_tokens
        if room < 1:
            raise UserError(
                f"--max_new_tokens={config.max_new_tokens} leaves no room in the model's {opened.longest[1]}="
                f"{opened.longest[0]}"
            )
        self._encoder = PrefixEncoder(opened.tokenizer, room, config.system_prompt)
        self._tree = config.what.method == "tree"
        self._bad, self._read = BadRows(config.max_bad_rows), 0
        self.summary = Summary()
        self.ledger = Ledger(
            done,
            write,
            encoder=self._encoder,
            engine=self._engine,
            grader=grader,
            rollouts=config.what.rollouts,
            join=self._join,
            pieces=lambda text: split_steps(text, config.separator),
            keep_texts=self._tree or config.what.keep_texts,
        )
        self._progress = ProgressLine("rolling")

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, in the order of the input; those that wait for completions elsewhere are missing."""
        read = read_questions if self._tree else None
        questions = (
            read(self._config.input, self._bad)
            if read is not None
            else read_solutions(self._config.input, self._config.separator, self._bad)
        )
        shard = shards.parse(self._config.shard)
        own = (one for one in self._counted(questions) if shard is None or shard.owns(one.question.question))
        while chunk := list(itertools.islice(own, self._config.what.questions_at_once)):
            self.summary.questions += len(chunk)
            for row in self._trees(chunk) if self._tree else self._solutions(chunk):
                self.summary.rows += 1
                yield row
        self._progress.clear()
        if not self._read:
            raise UserError(f"{', '.join(self._config.input)}: no question that could be read")

    def _counted(self, questions: Iterable[Labelled]) -> Iterator[Labelled]:
        for one in questions:
            self._read += 1
            yield one

    def report(self) -> dict[str, Any]:
        """For label.json."""
        counts, engine = self.ledger.counts, self._engine.counts
        return {
            "policy": self._engine.name,
            "rollouts": counts.rollouts,
            "tokens": counts.tokens,
            "prefixes": counts.prefixes,
            "cut_rollouts": counts.cut,
            "rollouts_without_verdict": counts.without_verdict,
            "prefixes_too_long": counts.too_long,
            **self.summary.as_dict(counts.rollouts),
            "bad_rows": self._bad.skipped,
            # Of this run alone: a resumed one computes nothing twice.
            "this_run": {
                "rollouts": engine.completions,
                "tokens": engine.tokens,
                "prompt_tokens_one_prefill_a_rollout": engine.prompt_tokens,
                "prompt_tokens_computed": engine.prefilled,
                "padding_tokens_computed": engine.padding,
                "share_computed": engine.prefilled / engine.prompt_tokens
                if engine.prefilled is not None and engine.prompt_tokens
                else None,
                "retries": engine.retries,
            },
        }

    def _run(self, chunk: Sequence[Labelled], methods: Sequence[tuple[int, Method[Any]]]) -> Rounds[Any]:
        rounds: Rounds[Any] = Rounds(methods)
        questions = [one.question for one in chunk]

        def roll(wanted: Sequence[tuple[int, Prefix]]) -> Iterator[tuple[tuple[int, Prefix], Outcome]]:
            yield from self.ledger.roll(questions, wanted, self._show)
            self.ledger.counts.check(self._config.what.max_truncated, last=False)

        rounds.run(roll)
        return rounds

    def _solutions(self, chunk: Sequence[Labelled]) -> Iterator[dict[str, Any]]:
        chunk = [one for one in map(self._graded, chunk) if self._kept(one)]
        for one in chunk:
            steps = {solution.number: solution.steps for solution in one.solutions}
            for number, candidate in enumerate(one.candidates):
                if candidate.steps is None:
                    self.summary.split.add(candidate.text or "", steps.get(number, ()))
        pairs = [(number, solution) for number, one in enumerate(chunk) for solution in one.solutions]
        rounds = self._run(chunk, [(number, self._method(solution)) for number, solution in pairs])
        for place, (number, solution) in enumerate(pairs):
            if place in rounds.results:
                outcomes = rounds.results[place]
                self.summary.add_solution(solution, outcomes, self._config.what.rollouts)
                yield row_forms.solution_row(chunk[number], solution, outcomes, self._engine.name)

    def _trees(self, chunk: Sequence[Labelled]) -> Iterator[dict[str, Any]]:
        tree = self._config.tree
        settings = TreeSettings(tree.alpha, tree.beta, tree.tree_length, tree.c_puct, tree.searches)
        methods = [(number, search(settings, self._cutter, self._grows)) for number in range(len(chunk))]
        rounds = self._run(chunk, methods)
        for number, one in enumerate(chunk):
            if number not in rounds.results:
                continue
            grown: SearchTree = rounds.results[number]
            if not self._grows(grown.root.outcome):
                self.summary.omitted_questions += 1
                continue
            self.summary.add_tree(grown, self._config.what.rollouts)
            yield from self._tree_rows(one, grown)

    def _tree_rows(self, one: Labelled, grown: SearchTree) -> Iterator[dict[str, Any]]:
        config = self._config.tree
        if config.write == "math_aps":
            yield row_forms.math_aps_row(one.question, grown, "" if config.pieces else self._config.separator)
        elif config.write == "rest_mcts":
            yield from row_forms.value_rows(one.question, grown)
        else:
            for row in row_forms.tree_rows(one.question, grown, self._engine.name, config.tree_rows == "edges"):
                if config.pieces:  # what remains is counted in steps
                    row |= {"remaining_steps": None, "question_remaining_steps": None}
                yield row

    def _method(self, solution: InputSolution) -> Method[list[Outcome | None]]:
        what = self._config.what
        if what.method == "bisect":
            if solution.correct is False:
                return first_error.bisect(solution.steps)
            if not (what.roll_right and solution.correct):
                return first_error.nothing(solution.steps)
        return first_error.sweep(solution.steps, what.stop_at_zero)

    def _graded(self, one: Labelled) -> Labelled:
        """Correctness of every candidate: its own, or by its answer."""
        graded = [
            candidate.correct
            if candidate.correct is not None
            else self._grader.verdicts([(candidate, one.question.answer, one.question.dataset)])[0]
            for candidate in one.candidates
        ]
        return with_correctness(one, graded)

    def _kept(self, one: Labelled) -> bool:
        kept = not one.rate[1] or self._within(one.rate[0] / one.rate[1])
        self.summary.omitted_questions += not kept
        return kept

    def _grows(self, first: Outcome) -> bool:
        """Whether a question's rate, that of its first rollouts, is not outside."""
        return first.rate is not None and self._within(first.rate)

    def _within(self, rate: float) -> bool:
        return self._config.what.min_rate <= rate <= self._config.what.max_rate

    def _join(self, prefix: Prefix) -> str:
        if self._tree and self._config.tree.pieces:
            return "".join(prefix)
        return self._config.separator.join([*prefix, ""]) if prefix else ""

    def _cutter(self, first: Outcome) -> Cut:
        if not self._config.tree.pieces:
            for rollout in first.rollouts:
                self.summary.split.add(rollout.text or "", split_steps(rollout.text or "", self._config.separator))
            return lambda _, text: split_steps(text, self._config.separator)
        mean = sum(rollout.tokens for rollout in first.rollouts) / max(len(first.rollouts), 1)
        size = max(round(mean / self._config.tree.pieces), 1)
        return lambda _, text: self._encoder.pieces(text, size)

    def _show(self) -> None:
        counts, progress = self._engine.counts, self._progress
        progress.show(
            lambda: (
                f"{self.summary.questions:,} questions begun, {counts.completions:,} rollouts, "
                f"{counts.tokens / progress.elapsed:,.1f} tokens/s"
            )
        )
