"""PRM800K, phases 1 and 2, and its screening rows: records of rated completions along one chosen path.

A record is {"question": {"problem", "ground_truth_answer", ...}, "label": {"steps": [...], "finish_reason", ...}, ...};
a step is {"completions": [{"text", "rating", ...}, ...] or null, "human_completion": {"text", ...} or null,
"chosen_completion": index or null}.

Expansion: the steps are walked with a prefix of the chosen texts. Each completion with a rating that is not the chosen
one ends its own trajectory. The path continues with the chosen completion; where none was chosen, with the human
completion, which counts as positive; where there is none either, it ends. The path is a trajectory, too. Alternatives
come in the order of the steps and the path comes last, which is depth-first order of the tree of prefixes.
"""

from __future__ import annotations

from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.data.formats.grouping import RowIsRecord
from cfprm_jax.errors import UserError

NAME = "prm800k"
GROUPING = RowIsRecord
FIELDS = ("question", "label")


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return isinstance(row.get("question"), dict) and isinstance(row.get("label"), dict) and "steps" in row["label"]


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The trajectories of one record.

    With alternatives off only the path is given; on a found_error record, whose last step has nothing chosen because
    its first completion is the error, the path then ends with that completion.

    Raises:
      UserError: a field is missing or invalid.
    """
    question, label = fields.mapping(row, "question"), fields.mapping(row, "label")
    problem = fields.text(question, "problem")
    answer = fields.optional_text(question, "ground_truth_answer")
    path: list[str] = []
    labels: list[Label] = []
    redundancy: list[Label] = []
    solutions: list[Solution] = []
    steps = fields.items(label, "steps")
    for number, step in enumerate(steps, 1):
        try:
            completions, chosen, human = _step(step, options.neutral)
        except UserError as error:
            raise UserError(f"step {number}: {error}") from None
        if options.alternatives:
            for index, (text, value, rating) in enumerate(completions):
                if index == chosen:
                    continue
                if rating is None:
                    options.leave_out("PRM800K completions without a rating, not chosen")
                elif value is None:
                    options.leave_out("PRM800K neutral alternatives (--neutral=drop)")
                else:
                    targets = [*redundancy, fields.redundancy(rating)]
                    solutions.append(
                        Solution(problem, [*path, text], [*labels, value], answer=answer, redundancy=targets)
                    )
        if chosen is not None:
            text, value, rating = completions[chosen]
        elif human is not None:
            text, value, rating = human, 1.0, None
        elif _ends_in_error(label, number, len(steps)) and completions and not options.alternatives:
            text, value, rating = completions[0]
        else:
            if number < len(steps):
                options.leave_out("PRM800K steps after a step with nothing chosen")
            break
        path.append(text)
        labels.append(value)
        redundancy.append(fields.redundancy(rating))
    if path:
        solutions.append(Solution(problem, path, labels, answer=answer, redundancy=redundancy))
    if not solutions:
        options.leave_out("PRM800K records without a rated or chosen step")
    return solutions


def _ends_in_error(label: dict[str, Any], number: int, steps: int) -> bool:
    return label.get("finish_reason") == "found_error" and number == steps


def _step(step: Any, neutral: str) -> tuple[list[tuple[str, Label, int | None]], int | None, str | None]:
    """A step's completions as (text, label, rating), the index of the chosen one, the human text."""
    if not isinstance(step, dict):
        raise UserError(f"expected an object, found {step!r:.80}")
    completions = []
    for completion in [] if step.get("completions") is None else fields.items(step, "completions"):
        if not isinstance(completion, dict):
            raise UserError(f"completion: expected an object, found {completion!r:.80}")
        rating = completion.get("rating")
        completions.append((fields.text(completion, "text"), fields.rating(rating, neutral), rating))
    chosen = fields.require(step, "chosen_completion")
    if chosen is not None and (type(chosen) is not int or not 0 <= chosen < len(completions)):
        raise UserError(f"chosen_completion {chosen!r:.80} is not an index of its {len(completions)} completions")
    human = step.get("human_completion")
    if human is None or isinstance(human, str):
        return completions, chosen, human
    if not isinstance(human, dict):
        raise UserError(f"human_completion: expected an object or null, found {human!r:.80}")
    return completions, chosen, fields.text(human, "text")
