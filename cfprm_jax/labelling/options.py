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
from cfprm_jax.options import Options, option, refuse_unused

METHODS = ("sweep", "bisect", "tree", "consensus")
# Of LabelConfig: what rollouts depend on.
_SAMPLING = (
    *("model", "grader_seconds", "grader_processes", "temperature", "top_p", "top_k", "max_new_tokens", "seed"),
    *("system_prompt", "step_separator", "batch_rows", "dtype"),
)


@dataclasses.dataclass(frozen=True)
class MethodConfig(Options):
    """What is rolled."""

    method: str = option(
        "sweep",
        "sweep samples rollouts after every step, bisect searches incorrect solutions for their first error, tree "
        "grows OmegaPRM's tree of a question, consensus keeps labelled rows with which a judge agrees.",
        choices=METHODS,
    )
    rollouts: int = option(8, "Number of rollouts per prefix.", lower=1, upper=MOST_CANDIDATES)
    stop_at_zero: bool = option(True, "sweep: steps after the first one without a success get no rollouts.")
    roll_right: bool = option(False, "bisect: sweep correct solutions; otherwise they get no rollouts.")
    min_rate: float = option(
        0.0, "Minimum rate of correct solutions of a question; questions below it are omitted.", lower=0.0, upper=1.0
    )
    max_rate: float = option(
        1.0, "Maximum rate of correct solutions of a question; questions above it are omitted.", lower=0.0, upper=1.0
    )
    max_truncated: float = option(
        0.5,
        "Maximum fraction, from 0 to 1, of all rollouts that end at --max_new_tokens; a larger one is an error.",
        lower=0.0,
        upper=1.0,
    )
    questions_at_once: int = option(64, "Number of questions in progress at one time.", lower=1, upper=MOST_COUNT)
    keep_texts: bool = option(False, "Store the texts of rollouts; always stored for tree.")


@dataclasses.dataclass(frozen=True)
class TreeConfig(Options):
    """The search tree of --method=tree."""

    alpha: float = option(0.5, "Base alpha of the weight of the success rate in Q (OmegaPRM).", lower=1e-6, upper=1.0)
    beta: float = option(0.9, "Base beta of the weight of the length in Q (OmegaPRM).", lower=1e-6, upper=1.0)
    tree_length: float = option(
        500.0, "Length unit L in tokens of the weight of the length in Q.", lower=1.0, upper=MOST_TOKENS
    )
    c_puct: float = option(0.125, "Exploration constant c_puct.", lower=0.0, upper=1e6)
    searches: int = option(100, "Number of searches per question.", lower=1, upper=MOST_COUNT)
    pieces: int = option(
        0,
        "Number of pieces of equal length in tokens that the mean first rollout is divided into, in place of steps "
        "(16 in the paper); 0 divides by steps.",
        lower=2,
        upper=4096,
        also=0,
    )
    tree_rows: str = option(
        "edges",
        "Rows of a tree. edges: one per edge, with its own labels only. paths: one per leaf, with all labels.",
        choices=("edges", "paths"),
    )
    write: str = option("stepwise", "Format of the output rows.", choices=("stepwise", "rest_mcts", "math_aps"))


@dataclasses.dataclass(frozen=True)
class JudgeConfig(Options):
    """The judge of --method=consensus."""

    write_judge_requests: str = option(
        "", "Write requests to a judge about the rows into this file, in place of --output."
    )
    judge: tuple[str, ...] = option(
        (), 'Verdicts of the judge: results of those requests, or {"id", "candidate", "first_error"}.', kind="list"
    )
    judge_model: str = option("judge", "Name of the model in the requests.")
    judge_tokens: int = option(8192, "Maximum length of a reply in tokens.", lower=1, upper=MOST_TOKENS)


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

    model: str = option("", "Hugging Face directory or hub name of the policy.")
    input: tuple[str, ...] = option(
        (),
        'Files or globs: candidates, stepwise rows with an "answer" (labels are not needed), or questions for '
        "--method=tree.",
        kind="list",
    )
    output: str = option("", "Output file of stepwise rows; compressed if its name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    shard: str = option(
        "",
        "INDEX/COUNT labels the share INDEX, from 0, of the questions, into OUTPUT.INDEX-of-COUNT; auto takes both "
        "from jax.distributed or the launcher (docs/running.md).",
    )
    merge: tuple[str, ...] = option(
        (), "Parts that --shard wrote, or globs: write them as one file and sample nothing.", kind="list"
    )
    max_bad_rows: int = option(
        0, "Maximum number of malformed rows; they are skipped and counted. One more is an error.", lower=0, upper=10**6
    )
    grader: str = option(
        "math_verify", "Comparison of final answers, as for bon; none is for --method=consensus only.", choices=GRADERS
    )
    grader_seconds: float = option(
        5.0, "CPU time limit in seconds per comparison of two answers.", lower=0.01, upper=3600.0
    )
    grader_processes: int = option(2, "Number of processes that compare answers.", lower=1, upper=256)
    temperature: float = option(0.7, "Sampling temperature.", lower=1e-4, upper=100.0)
    top_p: float = option(
        1.0, "Nucleus sampling: total probability of the tokens to sample from.", lower=1e-6, upper=1.0
    )
    top_k: int = option(0, "Number of most probable tokens to sample from; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(1024, "Maximum length of a rollout in tokens.", lower=1, upper=MOST_TOKENS)
    seed: int = option(0, "Random seed of the rollouts.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the chat template; empty is none.")
    step_separator: str = option("\\n\\n", "Separator between steps; \\n, \\t, \\r and \\\\ are decoded.")
    batch_rows: int = option(64, "Number of rollouts decoded concurrently, over all devices.", lower=1, upper=1 << 14)
    dtype: str = option(
        "auto",
        "Dtype of weights, activations and matrix products; auto is that of the directory's weights.",
        choices=("auto", "bfloat16", "float32"),
    )
    what: MethodConfig = dataclasses.field(default_factory=MethodConfig)
    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    consensus: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    engines: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engines.check_shard(self.shard)
        if not self.separator:
            raise UserError("--step_separator is empty, and a prefix ends with it")
        if self.what.min_rate > self.what.max_rate:
            raise UserError(f"--min_rate={self.what.min_rate:g} is above --max_rate={self.what.max_rate:g}")
        if self.what.method != "consensus" and self.grader == "none":
            raise UserError('--grader=none: rollouts have no "correct", so a grader must compare their answers')
        self._refuse_unused()
        if self.tree.pieces and self.tree.write == "rest_mcts":
            raise UserError("--write=rest_mcts: its values count steps, which --pieces replaces")
        if self.shard and self.what.method == "consensus":
            raise UserError("--method=consensus samples nothing: leave out --shard, and give it the merged rows")

    def _refuse_unused(self) -> None:
        """UserError for an option that is set and has no effect beside the others."""
        method, judge = self.what.method, self.consensus
        if method != "tree":
            names = [field.name for field in dataclasses.fields(self.tree)]
            refuse_unused(self.tree, names, f"--method=tree, not {method}")
        elif self.tree.write != "stepwise":
            refuse_unused(self.tree, ["tree_rows"], f"--write=stepwise, not {self.tree.write}")
        if method != "bisect":
            refuse_unused(self.what, ["roll_right"], f"--method=bisect, not {method}")
        if method != "sweep" and not self.what.roll_right:
            refuse_unused(self.what, ["stop_at_zero"], "--method=sweep, and bisect with --roll_right")
        if method != "consensus":
            names = [field.name for field in dataclasses.fields(judge)]
            refuse_unused(judge, names, f"--method=consensus, not {method}")
            self.engines.check_sampling(self)
            return
        if not judge.write_judge_requests:
            refuse_unused(judge, ["judge_model", "judge_tokens"], "--write_judge_requests")
        elif judge.judge or self.output:
            name = "judge" if judge.judge else "output"
            raise UserError(f"--write_judge_requests writes requests, and no rows: leave out --{name}")
        purpose = "methods that sample, not --method=consensus"
        names = [field.name for field in dataclasses.fields(self.what) if field.name != "method"]
        refuse_unused(self.what, names, purpose)
        refuse_unused(self, _SAMPLING, purpose)
        refuse_unused(self.engines, [field.name for field in dataclasses.fields(self.engines)], purpose)

    @property
    def separator(self) -> str:
        """The step separator with its escapes decoded."""
        return decode_escapes(self.step_separator)
