"""All options of `process_bench` and of `prm_bench`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import CACHE_FROZEN_HELP, LARGEST_SEED, MOST_COUNT, ScoringConfig, checked_cache_frozen
from cfprm_jax.errors import UserError
from cfprm_jax.options import option, refuse_unused


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(ScoringConfig):
    """Base of the configurations of both benchmarks.

    Attributes:
      EVALUATION: flags on which no score depends, so that parts of --shard may differ in them.
    """

    EVALUATION: ClassVar[frozenset[str]] = frozenset({"output_dir", "merge"})

    shard: str = option(
        "",
        "INDEX/COUNT scores the share INDEX, from 0, of the questions into OUTPUT_DIR.INDEX-of-COUNT.jsonl and "
        "evaluates nothing; auto takes both from jax.distributed or the launcher (docs/running.md).",
    )
    merge: tuple[str, ...] = option((), "Parts that --shard wrote, or globs: evaluate them.", kind="list")
    output_dir: str = option("", "Directory of the results; must be new or empty.")
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cache_frozen", checked_cache_frozen(self.cache_frozen))

    def refuse_unused(self, *more: str) -> None:
        """UserError for an option of scoring, where scores are there already.

        Args:
          more: options of a benchmark that are of scoring, too.
        """
        if not (self.model or self.checkpoint or self.merge):
            names = ["encoding", "step_separator", "dtype", "attention", "max_length", "cache_frozen", *more]
            refuse_unused(self, names, "scoring with --model or --checkpoint")


@dataclasses.dataclass(frozen=True)
class ProcessBenchConfig(BenchmarkConfig):
    """Evaluate a PRM on ProcessBench: accuracy of locating the first incorrect step, and F1.

    python -m cfprm_jax.process_bench --checkpoint=RUN --input=gsm8k.json,math.json --output_dir=DIRECTORY

    Reads the files as published: {"id", "problem", "steps", "label"}, where the label is the index of the first
    incorrect step, or -1. Rows with "step_scores", such as the predictions of an earlier run, need no model. Writes
    results.json, table.md, predictions.jsonl and the resolved flags into --output_dir.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "input", "output_dir", "threshold", "tune_on"),
        *("encoding", "step_separator", "max_length", "platform"),
    )
    EVALUATION: ClassVar[frozenset[str]] = BenchmarkConfig.EVALUATION | {"threshold", "tune_on"}

    input: tuple[str, ...] = option(
        (),
        'ProcessBench files or globs: .json or .jsonl, plain or .gz. A row is of the subset that its "subset" names, '
        "or else its id before the number (gsm8k-12), or else the name of its file.",
        kind="list",
    )
    threshold: float = option(
        0.5, "Score threshold: steps with lower scores are predicted as errors.", lower=0.0, upper=1.0
    )
    tune_on: str = option(
        "", "Subset on which the threshold is tuned, by its F1; overrides --threshold. Example: gsm8k.", kind="string"
    )


@dataclasses.dataclass(frozen=True)
class PRMBenchConfig(BenchmarkConfig):
    """Evaluate a PRM on PRMBench and ReasonEval: detection of incorrect and redundant steps, by error class.

    python -m cfprm_jax.prm_bench --checkpoint=RUN --input='PRMBench/data/*.jsonl' --output_dir=DIRECTORY

    Reads the files as published. Writes scores.jsonl (unless --scores is set), results.json, table.md, table.tex,
    report.html (a self-contained page) and the resolved flags into --output_dir.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "input", "output_dir", "scores", "scores2"),
        *("exclude_questions", "threshold", "redundancy_threshold", "encoding"),
    )
    EVALUATION: ClassVar[frozenset[str]] = BenchmarkConfig.EVALUATION | {
        *("scores", "scores2", "exclude_questions", "threshold", "redundancy_threshold"),
        *("resamples", "seed", "name", "name2", "report_cases"),
    }

    scores: tuple[str, ...] = option((), "scores.jsonl of an earlier run, in place of a model.", kind="list")
    scores2: tuple[str, ...] = option((), "scores.jsonl of a second model, for a paired comparison.", kind="list")
    input: tuple[str, ...] = option(
        (), "Files of PRMBench or ReasonEval, or globs: .jsonl, .json or parquet, plain or .gz.", kind="list"
    )
    exclude_questions: tuple[str, ...] = option(
        (),
        "Files with questions that may occur in the training data, such as the training corpus. PRMScore is also "
        "computed without the cases of these questions.",
        kind="list",
    )
    threshold: float = option(0.5, "Score above which a step is predicted correct.", lower=0.0, upper=1.0)
    redundancy_threshold: float = option(
        0.15,
        "Redundancy above which a step is predicted redundant, for PRMs with a redundancy output.",
        lower=0.0,
        upper=1.0,
    )
    strip_numbers: str = option(
        "auto",
        "Removal of numbers before steps (3. or Step 3.) from the input of the PRM. auto removes them from solutions "
        "in which every step has one.",
        choices=("auto", "always", "never"),
    )
    resamples: int = option(10000, "Bootstrap resamples of the confidence intervals.", lower=100, upper=10**6)
    seed: int = option(
        0, "Random seed of the bootstrap and of the split that tunes thresholds.", lower=0, upper=LARGEST_SEED
    )
    name: str = option("PRM", "Name of the model in tables.")
    name2: str = option("second PRM", "Name of the model of --scores2 in tables.")
    report_cases: int = option(
        20, "Maximum number of cases per class that report.html shows.", lower=0, upper=MOST_COUNT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == self.name2:
            raise UserError(f"--name and --name2 are both {self.name!r}: expected different names")
        if not self.scores2:
            refuse_unused(self, ["name2"], "comparisons with --scores2")
