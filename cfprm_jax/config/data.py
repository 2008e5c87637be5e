"""Options of data: reading, windows, encoding, packing."""

from __future__ import annotations

import dataclasses

from cfprm_jax.config.shared import (
    AFTER_FIRST_ERROR,
    DATA_FORMATS,
    ESTIMATES,
    MARKER,
    MOST_COUNT,
    MOST_GRANULARITY,
    MOST_TOKENS,
    PACKINGS,
    SCHEDULES,
    SYSTEM_PROMPT,
    Granularity,
    decode_escapes,
    parse_granularity,
)
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option, refuse_unused

_OF_ESTIMATES = {
    "hard": ("unrolled", "hard_threshold"),
    "relative": ("relative_threshold",),
    "entropy": ("entropy_eta",),
    "self_denoised": ("denoise_window", "denoise_floor"),
}
# Formats with ratings, and those with counts of rollouts.
_RATED = ("prm800k", "ratings")
_COUNTED = ("stepwise", "math_aps")


@dataclasses.dataclass(frozen=True)
class EstimateConfig(Options):
    """Step labels from counts of rollouts (docs/labels.md)."""

    estimate: str = option(
        "labels",
        "Labels of stepwise rows with successes and rollouts: labels (those of the row), hard, soft, relative, "
        "self_denoised, entropy, or value.",
        choices=ESTIMATES,
    )
    after_first_error: str = option(
        "null",
        "Steps after the first one without a successful rollout: unlabelled, negative, or labelled by their own "
        "counts. Does not apply to --estimate=labels.",
        choices=AFTER_FIRST_ERROR,
    )
    unrolled: str = option(
        "positive",
        "--estimate=hard: label of a step without rollouts, before a step with a success.",
        choices=("positive", "null"),
    )
    hard_threshold: int = option(
        1, "--estimate=hard: successes of a positive step; all, where it has fewer rollouts.", lower=1, upper=MOST_COUNT
    )
    relative_threshold: float = option(
        0.8,
        "--estimate=relative: a step is positive if its rate is this share of the previous one.",
        lower=0.0,
        upper=1e6,
    )
    entropy_eta: float = option(1.0, "--estimate=entropy: weight eta of the exponential mean.", lower=1e-6, upper=100.0)
    denoise_window: int = option(
        2, "--estimate=self_denoised: steps before the first error that get soft labels.", lower=0, upper=MOST_COUNT
    )
    denoise_floor: float = option(
        0.0,
        "--estimate=self_denoised: incorrect solutions of questions with at most this rate are omitted.",
        lower=0.0,
        upper=1.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimate == "labels":
            refuse_unused(self, ["after_first_error"], "an --estimate from counts of rollouts, not labels")
        for estimate, names in _OF_ESTIMATES.items():
            if estimate != self.estimate:
                refuse_unused(self, names, f"--estimate={estimate}, not {self.estimate}")


@dataclasses.dataclass(frozen=True)
class ReadConfig(Options):
    """Reading corpora."""

    data_format: str = option("auto", "Format of the corpora; auto detects it from the content.", choices=DATA_FORMATS)
    neutral: str = option(
        "positive",
        "Label of a neutral rating (0). drop leaves the step unlabelled and omits neutral alternatives.",
        choices=("positive", "negative", "drop"),
    )
    alternatives: bool = option(
        True, "PRM800K: add a trajectory for every rated completion that was not chosen, ending with it."
    )
    max_bad_rows: int = option(
        0,
        "Maximum number of malformed rows; they are skipped, counted and listed. One more is an error.",
        lower=0,
        upper=10**6,
    )
    estimates: EstimateConfig = dataclasses.field(default_factory=EstimateConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_format == "auto":
            return
        if self.data_format not in _RATED:
            refuse_unused(self, ["neutral"], f"--data_format={' and '.join(_RATED)}, not {self.data_format}")
        if self.data_format != "prm800k":
            refuse_unused(self, ["alternatives"], f"--data_format=prm800k, not {self.data_format}")
        if self.data_format not in _COUNTED:
            purpose = f"--data_format={' and '.join(_COUNTED)}, not {self.data_format}"
            refuse_unused(self.estimates, ["estimate"], purpose)


@dataclasses.dataclass(frozen=True)
class GranularityConfig(Options):
    """Granularities: window sizes and their order.

    Algorithm 1 of the paper.
    """

    c_max: int = option(
        1,
        "Largest window size, in steps: trains on granularities c_max, ..., 2, 1. 1 is plain training.",
        lower=1,
        upper=MOST_GRANULARITY,
    )
    granularities: tuple[str, ...] = option(
        (),
        'Window sizes in training order, such as 4,1 or whole. given: the sizes in "windows" of each row. Overrides '
        "--c_max.",
        kind="list",
    )
    epochs_per_granularity: int = option(
        1,
        "Passes over the data at each granularity. A small corpus needs more than one: 20 trajectories in batches of 8 "
        "are 3 optimizer steps per pass.",
        lower=1,
        upper=1000,
    )
    schedule: str = option(
        "coarse_to_fine",
        "Order of the granularities: coarse_to_fine as given, fine_to_coarse reversed, shuffled mixed.",
        choices=SCHEDULES,
    )
    window_tail: str = option(
        "keep", "Whether to keep a last window that is shorter than the others.", choices=("keep", "drop")
    )
    window_stride: str = option(
        "window",
        "Stride between windows. window: no overlap. 1: all shifted segmentations; a shorter leading window is "
        "unlabelled.",
        choices=("window", "1"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = self.stages
        if len(set(stages)) != len(stages):
            raise UserError(f"--granularities: {','.join(map(str, stages))} names one granularity twice")

    @property
    def stages(self) -> tuple[Granularity, ...]:
        """The granularities in the order given (before --schedule)."""
        if self.granularities:
            return tuple(parse_granularity(g) for g in self.granularities)
        return tuple(range(self.c_max, 0, -1))

    def refuse_unused(self) -> None:
        """UserError for options of windows of several steps, where no granularity has a fixed number above 1."""
        if not any(isinstance(size, int) and size > 1 for size in self.stages):
            purpose = f"granularities of 2 steps or more, not --granularities={','.join(map(str, self.stages))}"
            refuse_unused(self, ["window_tail", "window_stride"], purpose)


@dataclasses.dataclass(frozen=True)
class EncodingConfig(Options):
    """Encoding of solutions as tokens.

    The same for training and scoring; stored with the model.
    """

    max_length: int = option(
        2048,
        "Maximum length of an encoded solution in tokens. Longer ones are truncated at a window boundary.",
        lower=8,
        upper=MOST_TOKENS,
    )
    step_separator: str = option(
        "\\n\\n", "Separator between the steps of one window; \\n, \\t, \\r and \\\\ are decoded."
    )
    marker: str = option(
        MARKER,
        "Step marker: the token after each step at which its score is read, one added token of the tokenizer. "
        "<extra_0>, or auto, which means the same: in a tokenizer without it, a reserved token is renamed to it. Set "
        "another token for tokenizers without a reserved token (docs/encodings.md).",
    )
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the chat template.")

    @property
    def separator(self) -> str:
        """The step separator with its escapes decoded."""
        return decode_escapes(self.step_separator)

    def __post_init__(self) -> None:
        super().__post_init__()
        decode_escapes(self.step_separator)
        if self.marker == "auto":
            object.__setattr__(self, "marker", MARKER)


@dataclasses.dataclass(frozen=True)
class PackingConfig(Options):
    """Batches and packing."""

    packing: str = option(
        "tree",
        "Packing of trajectories into rows: tree shares common prefixes, sequence does not, none pads one per row.",
        choices=PACKINGS,
    )
    row_length: int = option(
        0,
        "Row length in tokens. 0 fits a small set of lengths to the corpus, multiples of 128; for trees, up to three "
        "times the longest solution.",
        lower=8,
        upper=4 * MOST_TOKENS,
        also=0,
    )
    row_shapes: int = option(
        16,
        "Maximum number of batch shapes fitted to the data, besides a few large ones for the rest. The training step "
        "compiles once per shape.",
        lower=1,
        upper=256,
    )
    batch_size: int = option(
        32,
        "Global batch size: trajectories per optimizer step, over all devices. Lower it for a corpus of few "
        "trajectories, which otherwise gives few steps.",
        lower=1,
        upper=1 << 16,
    )
    batch_tokens: int = option(
        0,
        "Global batch size in computed tokens; 0 is off. Replaces --batch_size for training batches: a batch takes "
        "trajectories (with --packing=tree --record_chunk=0, whole records) until it is full. With --packing=tree, "
        "prefixes shared within a record count once. A larger record is spread over consecutive steps.",
        lower=0,
        upper=1 << 30,
    )
    record_chunk: int = option(
        1,
        "Maximum number of trajectories of a record that are kept together when the data is shuffled, with "
        "--packing=tree. 1 shuffles single trajectories, as the other packings do; 0 keeps records whole. Larger "
        "chunks share more prefixes, but a batch then has fewer distinct records.",
        lower=0,
        upper=4096,
    )
