"""Flags of `label`, by concern."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import (
    LARGEST_SEED,
    MOST_CANDIDATES,
    MOST_COUNT,
    MOST_TOKENS,
    SYSTEM_PROMPT,
    DeviceConfig,
    decode_escapes,
)
from cfprm_jax.engines.options import EngineConfig
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import GRADERS
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES
from cfprm_jax.options import Options, option

METHODS = ("sweep", "bisect", "tree", "consensus")


@dataclasses.dataclass(frozen=True)
class MethodConfig(Options):
    """What is rolled."""

    method: str = option(
        "sweep",
        "sweep rolls every step, bisect searches incorrect solutions for their first error, tree grows OmegaPRM's "
        "tree of a question, consensus keeps labelled rows with which a judge agrees.",
        choices=METHODS,
    )
    rollouts: int = option(8, "Rollouts of a prefix.", lower=1, upper=MOST_CANDIDATES)
    stop_at_zero: bool = option(True, "sweep: steps after the first one without a success are not rolled.")
    roll_right: bool = option(False, "bisect: sweep correct solutions; otherwise they are not rolled.")
    min_rate: float = option(0.0, "Smallest rate of correct solutions of a question.", lower=0.0, upper=1.0)
    max_rate: float = option(
        1.0, "Largest rate of correct solutions of a question; others are omitted.", lower=0.0, upper=1.0
    )
    max_truncated: float = option(
        0.5, "Largest share of rollouts that --max_new_tokens may cut before the run stops.", lower=0.0, upper=1.0
    )
    questions_at_once: int = option(64, "Questions that are rolled together.", lower=1, upper=MOST_COUNT)
    keep_texts: bool = option(False, "Keep the texts of rollouts; tree always does.")


@dataclasses.dataclass(frozen=True)
class TreeConfig(Options):
    """The search tree of --method=tree."""

    alpha: float = option(0.5, "Base of the rate's weight in Q.", lower=1e-6, upper=1.0)
    beta: float = option(0.9, "Base of the length's weight in Q.", lower=1e-6, upper=1.0)
    tree_length: float = option(500.0, "Tokens L of a rollout that beta weighs once.", lower=1.0, upper=MOST_TOKENS)
    c_puct: float = option(0.125, "Weight of exploration.", lower=0.0, upper=1e6)
    searches: int = option(100, "Searches of a question.", lower=1, upper=MOST_COUNT)
    pieces: int = option(
        0,
        "Pieces of the mean first rollout, of equal numbers of tokens, in place of steps; 16 in the paper, 0 is steps.",
        lower=2,
        upper=4096,
        also=0,
    )
    tree_rows: str = option(
        "edges",
        "edges: a row an edge, with its labels alone; paths: a row a leaf, with all labels.",
        choices=("edges", "paths"),
    )
    write: str = option("stepwise", "Form of the rows.", choices=("stepwise", "rest_mcts", "math_aps"))


@dataclasses.dataclass(frozen=True)
class JudgeConfig(Options):
    """The judge of --method=consensus."""

    write_judge_requests: str = option("", "File for requests to a judge about the rows, in place of an output.")
    judge: tuple[str, ...] = option(
        (), 'Verdicts: results of those requests, or {"id", "candidate", "first_error"}.', kind="list"
    )
    judge_model: str = option("judge", "Model in the requests.")
    judge_tokens: int = option(8192, "Most tokens of a reply.", lower=1, upper=MOST_TOKENS)


@dataclasses.dataclass(frozen=True)
class LabelConfig(Options):
    """Label the steps of solutions from rollouts of a policy, from a search tree, or with a judge.

    python -m cfprm_jax.label --model=DIRECTORY --input=candidates.jsonl --output=rolled.jsonl --method=sweep

    Reads candidates files, stepwise rows with an "answer", or for --method=tree questions. Writes stepwise rows with
    counts of rollouts, from which prepare and train derive labels (--estimate); NAME.label.json, a summary; and
    NAME.rollouts.jsonl, every prefix that was rolled, from which --resume=auto continues. A count depends on the seed,
    the question, and the steps before it alone.
    """

    MAIN_FLAGS: ClassVar = (
        *("model", "input", "output", "method", "rollouts"),
        *("temperature", "max_new_tokens", "seed", "engine", "resume"),
    )

    model: str = option("", "Hugging Face directory of the policy.")
    input: tuple[str, ...] = option((), "Files, or globs: what is to be labelled.", kind="list")
    output: str = option("", "Stepwise rows to write; compressed if the name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    max_bad_rows: int = option(0, "Bad rows that are skipped and counted before the run stops.", lower=0, upper=10**6)
    grader: str = option("math_verify", "Grader of answers; none cannot grade rollouts.", choices=GRADERS)
    grader_seconds: float = option(
        5.0, "Processor time of a comparison before it is stopped.", lower=0.01, upper=3600.0
    )
    grader_processes: int = option(2, "Comparisons at once.", lower=1, upper=256)
    temperature: float = option(0.7, "Logits are divided by it.", lower=1e-4, upper=100.0)
    top_p: float = option(1.0, "Tokens are drawn among the most probable ones with this mass.", lower=1e-6, upper=1.0)
    top_k: int = option(0, "Tokens are drawn among this many most probable ones; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(1024, "Most tokens of a rollout.", lower=1, upper=MOST_TOKENS)
    seed: int = option(0, "Seed of the rollouts.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the chat template; empty is none.")
    step_separator: str = option("\\n\\n", "Text between steps; \\n, \\t, \\r and \\\\ are decoded.")
    batch_rows: int = option(64, "Rollouts decoded at once, over all devices.", lower=1, upper=1 << 14)
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto is the directory's.",
        choices=("auto", "bfloat16", "float32"),
    )
    what: MethodConfig = dataclasses.field(default_factory=MethodConfig)
    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    consensus: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    engines: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise UserError("--step_separator is empty, and a prefix ends with it")
        if self.what.min_rate > self.what.max_rate:
            raise UserError(f"--min_rate={self.what.min_rate:g} is above --max_rate={self.what.max_rate:g}")
        if self.what.method != "consensus" and self.grader == "none":
            raise UserError('--grader=none: rollouts have no "correct", so a grader must compare their answers')
        if self.what.method != "tree" and self.tree.write != "stepwise":
            raise UserError(f"--write={self.tree.write} is for --method=tree")

    @property
    def separator(self) -> str:
        """The step separator with its escapes decoded."""
        return decode_escapes(self.step_separator)
