"""What a run can be told: frozen dataclasses, one a concern, which the flags fill and everything below receives.

Nothing here reads a flag, a file, a device or a clock. Each field carries its own help, choices and bounds as metadata
(see :func:`option`), so that the flags, their validation and the configuration file written beside a run's output all
come from this one description. A configuration checks itself when it is made (:class:`Options`), so that Python callers
get the errors that flags give.

Every number has bounds. Inside them a value may still be a bad choice; outside them it has no meaning, or needs memory
or time that no machine has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from cfprm_jax.errors import UserError

Granularity = int | str
"""Steps in a window: a positive int, or "whole" for one window over the whole solution."""

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
MARKER = "<extra_0>"
# Where Qwen2.5-Math-PRM keeps its marker. A stock Qwen2.5 tokenizer has the unused <|quad_end|> there.
QWEN_MARKER_ID = 151651

DATA_FORMATS = ("auto", "prm800k", "stepwise", "math_shepherd", "rlhflow", "rest_mcts", "math_aps", "ratings")
ESTIMATES = ("labels", "hard", "soft", "relative", "self_denoised", "entropy", "value")
AFTER_FIRST_ERROR = ("null", "negative", "keep")
LOSSES = ("bce", "mse", "q_ranking")
LABEL_WEIGHTS = ("trajectory", "node", "question")
SCHEDULES = ("coarse_to_fine", "fine_to_coarse", "shuffled")
PACKINGS = ("tree", "sequence", "none")
ATTENTIONS = ("auto", "xla", "blockwise", "cudnn", "pallas")
ENCODINGS = ("auto", "cfprm", "qwen_prm", "trl", "math_shepherd", "rlhflow", "skywork")
AGGREGATIONS = ("min", "last", "product", "mean")

# Upper bounds that several options share.
MOST_GRANULARITY = 100  # steps: longer than the solutions of every published corpus; "whole" is beyond
MOST_TOKENS = 1 << 20  # the longest context of a published Qwen2.5 is 1,010,000 tokens
MOST_STEPS = 2**31 - 1  # optimizer steps are counted in int32
MOST_CANDIDATES = 1 << 16
MOST_COUNT = 10**7  # rows, trajectories or questions
LONGEST_WAIT = 7 * 86400  # seconds
LARGEST_SEED = 2**32 - 1  # JAX folds a larger one to 32 bits, where different seeds would be the same
_LONGEST_TEXT = 1 << 16


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    lower: float | None = None,
    upper: float | None = None,
    also: float | None = None,
    kind: str | None = None,
) -> Any:
    """A dataclass field that becomes a flag of the same name.

    Args:
      default: its default; its type is the flag's type, unless kind says otherwise.
      help: one or two sentences for --help.
      choices: the values allowed, for a string or the entries of a list.
      lower, upper: inclusive bounds; every number of a command has both.
      also: a number outside the bounds that is allowed because it has a meaning of its own, such as "0 is off".
      kind: "string", "int", "float", "bool" or "list" (comma-separated) where the default (None, ()) does not tell.
    """
    if kind is None:
        kind = {bool: "bool", int: "int", float: "float", str: "string", tuple: "list"}[type(default)]
    metadata = {"help": help, "choices": choices, "lower": lower, "upper": upper, "also": also, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of every configuration dataclass: checks each option against its kind, choices and bounds.

    A subclass with checks of its own calls ``super().__post_init__()`` first.

    Raises:
      UserError: naming the option as its flag, the value, and what was expected.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.metadata:
                object.__setattr__(self, field.name, _checked(f"--{field.name}", value, field.metadata))
            elif isinstance(field.default_factory, type) and not isinstance(value, field.default_factory):
                raise UserError(f"{field.name}={value!r:.80} is no {field.default_factory.__name__}")


def _checked(flag: str, value: Any, meta: Any) -> Any:
    """The value of an option; a list comes out as a tuple."""
    kind = meta["kind"]
    if kind == "list":
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise UserError(f"{flag}={_shown(value)} is not a list of texts")
        for entry in value:
            _check_text(flag, entry)
        if "" in value:
            raise UserError(f"{flag}={_shown(','.join(value))} has an empty entry")
        _check_choice(flag, value, meta["choices"])
        return tuple(value)
    if kind == "string":
        _check_text(flag, value)
        _check_choice(flag, [value], meta["choices"])
    elif kind == "bool":
        if not isinstance(value, bool):
            raise UserError(f"{flag}={_shown(value)} is neither true nor false")
    else:
        _check_number(flag, value, meta)
    return value


def _check_text(flag: str, text: Any) -> None:
    if not isinstance(text, str):
        raise UserError(f"{flag}: {_shown(text)} is not a text")
    if len(text) > _LONGEST_TEXT:
        raise UserError(
            f"{flag}={_shown(text)} is {len(text):,} characters long, at most {_LONGEST_TEXT:,} are allowed"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{flag}={_shown(text)} is not Unicode text (is it UTF-8?): {error.reason}") from error
    if "\0" in text:
        raise UserError(f"{flag}={_shown(text)} holds a NUL character")


def _check_choice(flag: str, values: Sequence[str], choices: Sequence[str] | None) -> None:
    unknown = [value for value in values if choices is not None and value not in choices]
    if unknown and choices is not None:
        raise UserError(f"{flag}={_shown(','.join(unknown))} is not among: {', '.join(choices)}")


def _check_number(flag: str, value: Any, meta: Any) -> None:
    kinds, name = ((int,), "a whole number") if meta["kind"] == "int" else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UserError(f"{flag}={_shown(value)} is not {name}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{flag}={value} is not a finite number")
    lower, upper = (
        (-math.inf if meta["lower"] is None else meta["lower"]),
        (math.inf if meta["upper"] is None else meta["upper"]),
    )
    also = meta["also"]
    if not (lower <= value <= upper or (also is not None and value == also)):
        other = f" or {also:g}" if also is not None else ""
        shown = [f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (lower, upper)]
        raise UserError(f"{flag}={_shown(value)} is outside its bounds: {shown[0]} to {shown[1]}{other}")


def _shown(value: Any) -> str:
    """A value on one line of a message, with an excerpt of a long one."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def whole_number(text: str, flag: str, lower: int, upper: int) -> int:
    """A number that stands in a list or in a text, such as an entry of --seeds.

    Raises:
      UserError: it is no number in digits, or outside the bounds.
    """
    # Python refuses to convert thousands of digits by an exception of its own.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and lower <= int(text) <= upper):
        raise UserError(f"{flag}: {_shown(text)!r} is not a whole number from {lower:,} to {upper:,}")
    return int(text)


def parse_granularity(text: str) -> Granularity:
    """ "3" -> 3, "whole" -> "whole"; anything else is a UserError."""
    if text == "whole":
        return "whole"
    try:
        return whole_number(text, "--granularities", 1, MOST_GRANULARITY)
    except UserError as error:
        raise UserError(f"{error}, nor 'whole'") from None


def decode_escapes(text: str) -> str:
    r"""Backslash-n, -t, -r and -backslash as typed in a shell or a flag file become the characters they stand for."""
    plain = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    out, rest = [], iter(text)
    for character in rest:
        if character != "\\":
            out.append(character)
            continue
        following = next(rest, None)
        if following not in plain:
            raise UserError(
                f"--step_separator: unknown escape \\{following or ''} in {text!r}; known: \\n \\t \\r \\\\"
            )
        out.append(plain[following])
    return "".join(out)


@dataclasses.dataclass(frozen=True)
class EstimateConfig(Options):
    """Step labels from counts of rollouts; see :mod:`cfprm_jax.data.estimates`."""

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
    hard_threshold: int = option(1, "--estimate=hard: successes of a positive step.", lower=1, upper=MOST_COUNT)
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


@dataclasses.dataclass(frozen=True)
class ReadConfig(Options):
    """How corpora are read."""

    data_format: str = option("auto", "Format of the corpora; auto tells by content.", choices=DATA_FORMATS)
    neutral: str = option(
        "positive",
        "What a neutral rating (0) counts as. drop leaves the step unlabelled and omits alternatives that are neutral.",
        choices=("positive", "negative", "drop"),
    )
    alternatives: bool = option(
        True, "PRM800K: every rated completion that was not chosen ends a trajectory of its own."
    )
    max_bad_rows: int = option(
        0, "Malformed rows that are skipped, counted and listed before the run stops.", lower=0, upper=10**6
    )
    estimates: EstimateConfig = dataclasses.field(default_factory=EstimateConfig)


@dataclasses.dataclass(frozen=True)
class GranularityConfig(Options):
    """Coarse to fine: which window sizes, in which order (Algorithm 1 of the paper)."""

    c_max: int = option(
        1, "Largest window: granularities c_max, ..., 2, 1. 1 is plain training.", lower=1, upper=MOST_GRANULARITY
    )
    granularities: tuple[str, ...] = option(
        (), "Window sizes in the order of training, such as 4,1 or whole. Overrides --c_max.", kind="list"
    )
    epochs_per_granularity: int = option(1, "Passes over the data at each granularity.", lower=1, upper=1000)
    schedule: str = option(
        "coarse_to_fine",
        "coarse_to_fine takes the granularities in the order given, fine_to_coarse in reverse, shuffled mixes them.",
        choices=SCHEDULES,
    )
    window_tail: str = option("keep", "The last window when it is shorter than the others.", choices=("keep", "drop"))
    window_stride: str = option(
        "window",
        "window: windows do not overlap. 1: all shifted segmentations, a shorter leading window being unlabelled.",
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


@dataclasses.dataclass(frozen=True)
class EncodingConfig(Options):
    """How a solution becomes tokens; the same for training and scoring, and stored with the model."""

    max_length: int = option(
        2048, "Longest encoded solution in tokens; whole windows are cut from the end.", lower=8, upper=MOST_TOKENS
    )
    step_separator: str = option("\\n\\n", "Text between the steps of one window; \\n, \\t, \\r and \\\\ are decoded.")
    marker: str = option(
        MARKER,
        "Name of the token at which a step's score is read. auto is <extra_0>, to which a token that the tokenizer "
        "keeps in reserve is renamed if it has none of that name.",
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
    """How encoded trajectories fill the rows of a batch."""

    packing: str = option(
        "tree", "tree shares common prefixes, sequence packs without sharing, none pads one a row.", choices=PACKINGS
    )
    row_length: int = option(
        0,
        "Tokens a row. 0 fits a small set of lengths, multiples of 128, to the corpus: for trees up to three times the "
        "longest solution.",
        lower=8,
        upper=4 * MOST_TOKENS,
        also=0,
    )
    row_shapes: int = option(
        16,
        "Most batch shapes fitted to the data, beside a few large ones for the rest. The step compiles once a shape.",
        lower=1,
        upper=256,
    )
    batch_size: int = option(32, "Trajectories an optimizer step, over all devices.", lower=1, upper=1 << 16)
    batch_tokens: int = option(
        0,
        "Most computed tokens an optimizer step, in place of --batch_size, which then sizes evaluation batches only: "
        "trajectories, with --packing=tree --record_chunk=0 whole records, are taken until it is full. Prefixes that "
        "trajectories of a record share count once with --packing=tree. A record that is larger is spread over "
        "consecutive steps.",
        lower=0,
        upper=1 << 30,
    )
    record_chunk: int = option(
        1,
        "--packing=tree: most trajectories of a record that stay together in the order of the data; 1 shuffles every "
        "trajectory, as the other packings do, 0 keeps records whole. More share more prefixes in a batch, and make "
        "batches of fewer records, from which less is learned.",
        lower=0,
        upper=4096,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Options):
    """Which network, and how it computes."""

    model: str = option(
        "synthetic",
        "Hugging Face directory of the backbone or of a PRM to go on from; synthetic is a small network made here.",
    )
    init: str = option(
        "pretrained",
        "Where the weights come from: the directory's safetensors files, or a random initialisation by --seed.",
        choices=("pretrained", "random"),
    )
    head: str = option("linear", "Reward head: Linear, or Linear-ReLU-Linear.", choices=("linear", "mlp"))
    dtype: str = option("bfloat16", "Type of activations and matrix products.", choices=("bfloat16", "float32"))
    attention: str = option(
        "auto",
        "Attention kernel: cudnn for NVIDIA GPUs in bfloat16, pallas for TPUs, blockwise and xla anywhere; auto "
        "takes what suits the device.",
        choices=ATTENTIONS,
    )
    remat: str = option(
        "layer",
        "Activations recomputed in the backward pass: none; the MLPs', which are most of them; or all but each layer's "
        "input, which costs a third more arithmetic and least memory.",
        choices=("none", "mlp", "layer"),
    )
    deterministic: bool = option(
        False,
        "On GPUs, take only kernels that give the same bits every time, chosen by rule and not by measuring: slower. "
        "On CPUs and TPUs all are so.",
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig(Options):
    """Low-rank adapters: only they and the reward head are trained, and the backbone stays as it is."""

    lora_rank: int = option(0, "Rank of the adapters; 0 trains the whole network.", lower=0, upper=8192)
    lora_alpha: float = option(32.0, "What the adapters add counts lora_alpha / lora_rank.", lower=1e-6, upper=1e6)
    lora_targets: tuple[str, ...] = option(
        ("query", "key", "value", "output", "gate", "up", "down"),
        "Matrices that get adapters, by these names or Hugging Face's (q_proj, ...).",
        kind="list",
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options):
    """AdamW with linear warm-up and a decay over the whole run."""

    optimizer: str = option(
        "adamw",
        "adamw holds masters and moments in float32, 16 bytes a parameter with gradients. adamw_compact holds the "
        "float32 masters exactly and the moments in 8 bits, 8 bytes with gradients: a 7B fine-tune on one 80 GB card.",
        choices=("adamw", "adamw_compact"),
    )
    learning_rate: float = option(2e-6, "Peak learning rate.", lower=0.0, upper=1.0)
    warmup_fraction: float = option(
        0.03, "Share of the steps in which the rate rises linearly from 0.", lower=0.0, upper=1.0
    )
    decay: str = option("cosine", "Shape of the decay after the warm-up.", choices=("cosine", "linear", "constant"))
    final_rate_fraction: float = option(
        0.0, "Learning rate that the decay reaches at the end of the run, as a share of the peak.", lower=0.0, upper=1.0
    )
    adam_b1: float = option(0.9, "AdamW's beta 1.", lower=0.0, upper=0.99999)
    adam_b2: float = option(0.999, "AdamW's beta 2.", lower=0.0, upper=0.99999)
    adam_eps: float = option(1e-8, "AdamW's epsilon.", lower=1e-30, upper=1.0)
    weight_decay: float = option(
        0.0, "Decoupled weight decay of matrices (never of biases, norms and embeddings).", lower=0.0, upper=1000.0
    )
    max_grad_norm: float = option(
        1.0, "Global gradient norm above which gradients are scaled down; 0 is off.", lower=1e-6, upper=1e6, also=0.0
    )
    accumulation: int = option(
        1, "Parts a step's rows are computed in, one after another, to save memory.", lower=1, upper=1024
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate * self.weight_decay > 1:
            raise UserError(
                f"--learning_rate={self.learning_rate:g} times --weight_decay={self.weight_decay:g} is above 1: "
                "one step would decay weights beyond 0"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig(Options):
    """What is minimised."""

    loss: str = option("q_ranking", "Training loss.", choices=LOSSES)
    margin: float = option(4.0, "Margin of Q-ranking (zeta in PQM).", lower=0.0, upper=1000.0)
    label_weight: str = option(
        "trajectory",
        "What counts once. trajectory: every label of every trajectory. node: each distinct step of a batch (same "
        "question, same steps before it, same text), with the mean of its labels. question, of q_ranking alone: each "
        "question, as the mean of its trajectories.",
        choices=LABEL_WEIGHTS,
    )
    ranking_negatives: str = option(
        "path",
        "--loss=q_ranking --label_weight=node: negative steps that a positive one is ranked against. path: those that "
        "hang off the path to it. question: all of its question.",
        choices=("path", "question"),
    )
    negative_weight: float = option(
        1.0,
        "Weight in bce and mse of steps labelled 0.5 or less, in the sum and in what it is divided by.",
        lower=0.0,
        upper=1000.0,
    )
    redundancy_weight: float = option(
        0.0,
        "Weight of a second output of the reward head beside the loss: binary cross-entropy of whether a step is right "
        "but of no use, which is PRM800K's rating 0 against 1 (a step rated -1 has no target). 0 is without it.",
        lower=0.0,
        upper=100.0,
    )

    @property
    def redundancy(self) -> bool:
        """Whether the reward head has a redundancy output."""
        return self.redundancy_weight > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "q_ranking" and self.negative_weight != 1:
            raise UserError(f"--negative_weight={self.negative_weight:g} is for --loss=bce and mse, not q_ranking")
        if self.loss != "q_ranking" and self.label_weight == "question":
            raise UserError(
                f"--label_weight=question is for --loss=q_ranking, not {self.loss}; choose trajectory or node"
            )


@dataclasses.dataclass(frozen=True)
class DeviceConfig(Options):
    """Where it runs."""

    platform: str = option(
        "auto", "Accelerator to run on; one that is not there is an error.", choices=("auto", "cpu", "gpu", "tpu")
    )
    mesh: str = option("data=-1,fsdp=1,tensor=1", "Devices along each mesh axis; -1 takes the rest.")
    compile_cache_dir: str = option(
        "auto", "Where compiled steps are kept for the next start: auto is the user's cache, empty is nowhere."
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Options):
    """Several processes as one run; launch/ has a file for each place to run."""

    distributed: str = option(
        "auto",
        "auto joins the processes that the flags below, JAX_COORDINATOR_ADDRESS, Slurm or a TPU pod name, if any; off "
        "runs this process alone.",
        choices=("auto", "off"),
    )
    coordinator: str = option("", "HOST:PORT of process 0, given to every process with the next two.")
    num_processes: int = option(0, "Number of processes.", lower=0, upper=1 << 16)
    process_id: int = option(-1, "Index of this process, from 0.", lower=-1, upper=(1 << 16) - 1)
    initialization_timeout: int = option(
        300, "Seconds that processes wait for each other at the start.", lower=1, upper=LONGEST_WAIT
    )
    heartbeat_timeout: int = option(
        100,
        "Seconds without a sign of life after which a process counts as dead and ends the run.",
        lower=1,
        upper=LONGEST_WAIT,
    )
    wait_timeout: int = option(
        86400,
        "Seconds that processes wait for one that is alive but not done, such as the first, which tokenises the corpus "
        "for all.",
        lower=1,
        upper=LONGEST_WAIT,
    )


@dataclasses.dataclass(frozen=True)
class RunConfig(Options):
    """What training writes, and how often."""

    output_dir: str = option("", "Directory of the run.")
    resume: str = option(
        "never",
        "never refuses an --output_dir that holds a run, auto goes on with it or starts one, always needs it there.",
        choices=("never", "auto", "always"),
    )
    seed: int = option(
        0, "Seed of the order of the data and of the head's initialisation.", lower=0, upper=LARGEST_SEED
    )
    max_steps: int = option(
        0, "Stop after so many optimizer steps; 0 trains to the end of the data.", lower=0, upper=MOST_STEPS
    )
    log_every: int = option(
        10,
        "Optimizer steps between printed lines and TensorBoard points; metrics.jsonl has every step.",
        lower=1,
        upper=MOST_STEPS,
    )
    eval_every: int = option(
        0, "Optimizer steps between evaluations; 0 evaluates at the end only.", lower=0, upper=MOST_STEPS
    )
    checkpoint_every: int = option(
        500, "Optimizer steps between checkpoints; there is always one at the end.", lower=1, upper=MOST_STEPS
    )
    keep_checkpoints: int = option(2, "Newest checkpoints that are kept.", lower=1, upper=10_000)
    keep_best: str = option(
        "none",
        "Held-out metric by which the best checkpoint is kept too, saved at its evaluation: OUTPUT_DIR/best.",
        choices=("none", "loss", "step_accuracy", "negative_f1", "auroc", "distinct_negative_f1", "distinct_auroc"),
    )
    preemption_exit_code: int = option(
        0,
        "Exit status after a SIGTERM, when all is saved; one of its own tells a scheduler to start the run again.",
        lower=0,
        upper=255,
    )
    data_cache_dir: str = option(
        "auto", "Where tokenised corpora are kept for the next start: auto is the user's cache."
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Options):
    """The held-out split."""

    eval_data: tuple[str, ...] = option((), "Corpora to evaluate on; overrides --eval_fraction.", kind="list")
    eval_fraction: float = option(
        0.02,
        "Share of the questions, chosen by a hash of their text, that is held out of training.",
        lower=0.0,
        upper=0.5,
    )
    eval_max_trajectories: int = option(
        512, "Most trajectories evaluated each time; 0 takes all.", lower=0, upper=MOST_COUNT
    )
    bon_n: tuple[str, ...] = option(
        ("8", "16", "32", "64"), "With --bon_candidates: numbers of candidates to choose from.", kind="list"
    )
    bon_candidates: str = option(
        "", "Candidates file that the trained PRM ranks at the end; synthetic is that of the arithmetic world."
    )
