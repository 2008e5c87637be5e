"""Configuration: frozen dataclasses, one per subject, filled from flags by the commands and passed to everything below.

Nothing here reads a flag, a file, a device or a clock. The fields are options (:mod:`cfprm_jax.options`), from which
the flags, their validation and the configuration file beside the output of a run are derived.

Every number has bounds. A value within them may still be a bad choice; a value outside them has no meaning, or needs
memory or time that no machine has.
"""

from __future__ import annotations

import dataclasses

from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option, whole_number

Granularity = int | str
"""Steps in a window: a positive int, "whole" for one window over the whole solution, or "given" for the row's own."""
NAMED_GRANULARITIES = ("given", "whole")

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
MARKER = "<extra_0>"
# Where Qwen2.5-Math-PRM keeps its marker. A stock Qwen2.5 tokenizer has the unused <|quad_end|> there.
QWEN_MARKER_ID = 151651

DATA_FORMATS = ("auto", "prm800k", "stepwise", "math_shepherd", "rlhflow", "rest_mcts", "math_aps", "ratings")
ESTIMATES = ("labels", "hard", "soft", "relative", "self_denoised", "entropy", "value")
AFTER_FIRST_ERROR = ("null", "negative", "keep")
LOSSES = ("bce", "mse", "q_ranking")
LABEL_WEIGHTS = ("trajectory", "node", "question")
LOGGERS = ("tensorboard", "wandb", "trackio")
SCHEDULES = ("coarse_to_fine", "fine_to_coarse", "shuffled")
PACKINGS = ("tree", "sequence", "none")
ATTENTIONS = ("auto", "xla", "blockwise", "cudnn", "pallas")
ENCODINGS = ("auto", "cfprm", "qwen_prm", "trl", "math_shepherd", "rlhflow", "skywork")
AGGREGATIONS = ("min", "last", "product", "mean")

# Help texts that several commands share.
ATTENTION_HELP = (
    "Attention implementation: cudnn on NVIDIA GPUs in bfloat16, pallas on TPUs, blockwise and xla on any device; auto "
    "selects by device."
)
ENCODING_HELP = (
    "Encoding of solutions that the PRM was trained with (docs/encodings.md). auto detects it from the files of the "
    "directory; it is an error if they do not determine it."
)
STEP_SEPARATOR_HELP = (
    "Step separator, with escapes, of a PRM with --encoding=trl: follows each step. Empty is the default of the "
    "encoding."
)
DTYPE_HELP = (
    "Dtype of activations and matrix products; auto is the dtype of the training run, or of the directory's weights."
)
CHECKPOINT_HELP = "Run directory of train (its newest checkpoint), or one of its checkpoints/STEP."

# Upper bounds that several options share.
MOST_GRANULARITY = 100  # steps: longer than the solutions of every published corpus; "whole" is beyond
MOST_TOKENS = 1 << 20  # the longest context of a published Qwen2.5 is 1,010,000 tokens
MOST_STEPS = 2**31 - 1  # optimizer steps are counted in int32
MOST_CANDIDATES = 1 << 16
MOST_COUNT = 10**7  # rows, trajectories or questions
LONGEST_WAIT = 7 * 86400  # seconds
LARGEST_SEED = 2**32 - 1  # JAX folds a larger one to 32 bits, where different seeds would be the same


def parse_granularity(text: str) -> Granularity:
    """ "3" -> 3; "whole" and "given" as they are; anything else is a UserError."""
    if text in NAMED_GRANULARITIES:
        return text
    try:
        return whole_number(text, "--granularities", 1, MOST_GRANULARITY)
    except UserError as error:
        raise UserError(f"{error}, nor one of {', '.join(NAMED_GRANULARITIES)}") from None


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
    epochs_per_granularity: int = option(1, "Epochs over the data at each granularity.", lower=1, upper=1000)
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
        "Step marker: the token at which a step's score is read. auto is <extra_0>; in a tokenizer without it, a "
        "reserved token is renamed to it.",
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
        32, "Global batch size: trajectories per optimizer step, over all devices.", lower=1, upper=1 << 16
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


@dataclasses.dataclass(frozen=True)
class ModelConfig(Options):
    """Model and compute."""

    model: str = option(
        "synthetic",
        "Hugging Face directory or hub name (owner/name, owner/name@revision) of a backbone, or of a PRM as warm "
        "start. synthetic generates a small network.",
    )
    init: str = option(
        "pretrained",
        "Initial weights: the safetensors files of --model, or random values drawn with --seed.",
        choices=("pretrained", "random"),
    )
    head: str = option("linear", "Reward head: Linear, or Linear-ReLU-Linear.", choices=("linear", "mlp"))
    dtype: str = option("bfloat16", "Dtype of activations and matrix products.", choices=("bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    remat: str = option(
        "layer",
        "Rematerialisation: activations recomputed in the backward pass. none: no activations. mlp: those of the MLPs, "
        "the largest part. layer: all but the input of each layer; least memory, a third more FLOPs.",
        choices=("none", "mlp", "layer"),
    )
    deterministic: bool = option(
        False,
        "Bitwise reproducible training on GPUs: deterministic kernels only, without autotuning; slower. CPUs and TPUs "
        "are deterministic without it.",
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig(Options):
    """LoRA adapters.

    Trained together with the reward head; the backbone is frozen.
    """

    lora_rank: int = option(0, "Rank of the adapters; 0 trains the full network.", lower=0, upper=8192)
    lora_alpha: float = option(
        32.0, "Scale of the adapters' output: multiplied by lora_alpha / lora_rank.", lower=1e-6, upper=1e6
    )
    lora_targets: tuple[str, ...] = option(
        ("query", "key", "value", "output", "gate", "up", "down"),
        "Weight matrices with adapters, by these names or Hugging Face's (q_proj, ...).",
        kind="list",
    )


CACHE_FROZEN_HELP = (
    "Where the output of the frozen layers is stored: it is computed once for each distinct token, and later epochs "
    "and runs read it. off computes it each time, auto is the user's cache, anything else is a directory. It takes 2 "
    "bytes (in float32 4) x width x tokens."
)


@dataclasses.dataclass(frozen=True)
class FrozenConfig(Options):
    """Lower layers that keep their weights (docs/frozen_layers.md)."""

    frozen_layers: int = option(
        0,
        "Number of lowest decoder layers that are not trained, and the embedding with them: no gradients, no optimizer "
        "state, no backward pass. All layers trains the head alone; 0 freezes nothing.",
        lower=0,
        upper=1 << 14,
    )
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)

    @property
    def cached(self) -> bool:
        """Whether the output of the frozen layers is read from a cache."""
        return self.frozen_layers > 0 and self.cache_frozen != "off"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options):
    """Optimizer: AdamW with linear warm-up and decay."""

    optimizer: str = option(
        "adamw",
        "adamw keeps float32 master weights and moments: 16 bytes per parameter, gradients included. adamw_compact "
        "keeps exact float32 master weights and 8-bit moments: 8 bytes; fits a 7B fine-tune on one 80 GB GPU.",
        choices=("adamw", "adamw_compact"),
    )
    learning_rate: float = option(2e-6, "Peak learning rate.", lower=0.0, upper=1.0)
    warmup_fraction: float = option(
        0.03, "Fraction of the optimizer steps with linear warm-up from 0.", lower=0.0, upper=1.0
    )
    decay: str = option("cosine", "Learning rate schedule after the warm-up.", choices=("cosine", "linear", "constant"))
    final_rate_fraction: float = option(
        0.0, "Final learning rate at the end of the decay, as a fraction of the peak.", lower=0.0, upper=1.0
    )
    adam_b1: float = option(0.9, "AdamW's beta 1.", lower=0.0, upper=0.99999)
    adam_b2: float = option(0.999, "AdamW's beta 2.", lower=0.0, upper=0.99999)
    adam_eps: float = option(1e-8, "AdamW's epsilon.", lower=1e-30, upper=1.0)
    weight_decay: float = option(
        0.0, "Decoupled weight decay of matrices; biases, norms and embeddings have none.", lower=0.0, upper=1000.0
    )
    max_grad_norm: float = option(
        1.0, "Gradient clipping: maximum global norm; 0 is off.", lower=1e-6, upper=1e6, also=0.0
    )
    accumulation: int = option(
        1, "Gradient accumulation: microbatches per optimizer step. More of them need less memory.", lower=1, upper=1024
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate * self.weight_decay > 1:
            raise UserError(
                f"--learning_rate={self.learning_rate:g} times --weight_decay={self.weight_decay:g} is above 1: "
                "a single step would change the sign of the weights"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig(Options):
    """Loss."""

    loss: str = option("q_ranking", "Training loss.", choices=LOSSES)
    margin: float = option(4.0, "Margin of Q-ranking (zeta in PQM).", lower=0.0, upper=1000.0)
    label_weight: str = option(
        "trajectory",
        "Unit that has weight one in the loss. trajectory: every label of every trajectory. node: each distinct step "
        "of a batch (same question, previous steps and text), with the mean of its labels. question, for q_ranking "
        "only: each question, as the mean over its trajectories.",
        choices=LABEL_WEIGHTS,
    )
    ranking_negatives: str = option(
        "path",
        "Negative steps that a positive step is ranked against, with --loss=q_ranking --label_weight=node. path: "
        "those whose previous step is on the path to it. question: all of its question.",
        choices=("path", "question"),
    )
    negative_weight: float = option(
        1.0,
        "Class weight, for bce and mse, of steps labelled 0.5 or less. Applies to the sum and to the normaliser.",
        lower=0.0,
        upper=1000.0,
    )
    redundancy_weight: float = option(
        0.0,
        "Weight of the redundancy loss; 0 is off. Adds a second output to the reward head, trained by binary "
        "cross-entropy to detect steps that are correct but redundant: PRM800K's rating 0 against 1. Steps rated -1 "
        "have no target.",
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
    """Devices."""

    platform: str = option(
        "auto", "Accelerator; an error if it is not available.", choices=("auto", "cpu", "gpu", "tpu")
    )
    mesh: str = option(
        "data=-1,fsdp=1,tensor=1", "Device mesh: number of devices along each axis; -1 is all that remain."
    )
    compile_cache_dir: str = option(
        "auto",
        "Directory of JAX's persistent compilation cache. auto is in the user's cache directory; empty disables it.",
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Options):
    """Distributed training.

    launch/ has a script for each environment.
    """

    distributed: str = option(
        "auto",
        "auto joins a distributed run if --coordinator, JAX_COORDINATOR_ADDRESS, Slurm or a TPU pod describes one; off "
        "runs a single process.",
        choices=("auto", "off"),
    )
    coordinator: str = option(
        "", "Address of process 0, HOST:PORT. Required in every process, with --num_processes and --process_id."
    )
    num_processes: int = option(0, "Number of processes.", lower=0, upper=1 << 16)
    process_id: int = option(-1, "Index of this process, from 0.", lower=-1, upper=(1 << 16) - 1)
    initialization_timeout: int = option(
        300, "Timeout in seconds for all processes to connect at the start.", lower=1, upper=LONGEST_WAIT
    )
    heartbeat_timeout: int = option(
        100,
        "Timeout in seconds after which a process without heartbeat is considered dead, which ends the run.",
        lower=1,
        upper=LONGEST_WAIT,
    )
    wait_timeout: int = option(
        86400,
        "Timeout in seconds for waiting on a live process, such as the main process while it tokenises the corpus.",
        lower=1,
        upper=LONGEST_WAIT,
    )


@dataclasses.dataclass(frozen=True)
class RunConfig(Options):
    """Run directory: checkpoints, logs, resuming."""

    output_dir: str = option("", "Run directory.")
    resume: str = option(
        "never",
        "Whether to resume a run in --output_dir. never: it is an error if there is one. auto: resume it, or start a "
        "new one. always: it is an error if there is none.",
        choices=("never", "auto", "always"),
    )
    seed: int = option(
        0, "Random seed of the data order and of the reward head's initialisation.", lower=0, upper=LARGEST_SEED
    )
    max_steps: int = option(
        0, "Maximum number of optimizer steps; 0 trains to the end of the data.", lower=0, upper=MOST_STEPS
    )
    log_every: int = option(
        10,
        "Optimizer steps between printed lines and between points of --logger; metrics.jsonl has every step.",
        lower=1,
        upper=MOST_STEPS,
    )
    logger: tuple[str, ...] = option(
        ("tensorboard",),
        "Loggers beside metrics.jsonl, comma-separated; empty is none. A logger that fails is dropped, and training "
        "continues.",
        choices=LOGGERS,
        kind="list",
    )
    eval_every: int = option(
        0, "Optimizer steps between evaluations; 0 evaluates at the end only.", lower=0, upper=MOST_STEPS
    )
    checkpoint_every: int = option(
        500, "Optimizer steps between checkpoints; the last step always has one.", lower=1, upper=MOST_STEPS
    )
    keep_checkpoints: int = option(2, "Number of newest checkpoints to keep.", lower=1, upper=10_000)
    keep_best: str = option(
        "none",
        "Held-out metric for keeping the best checkpoint, in OUTPUT_DIR/best, besides the newest.",
        choices=("none", "loss", "step_accuracy", "negative_f1", "auroc", "distinct_negative_f1", "distinct_auroc"),
    )
    preemption_exit_code: int = option(
        0,
        "Exit status after a SIGTERM, once the checkpoint is saved. A nonzero status can make a scheduler restart the "
        "run.",
        lower=0,
        upper=255,
    )
    data_cache_dir: str = option(
        "auto", "Directory of cached tokenised corpora; auto is in the user's cache directory."
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Options):
    """Evaluation."""

    eval_data: tuple[str, ...] = option((), "Held-out corpora; overrides --eval_fraction.", kind="list")
    eval_fraction: float = option(
        0.02,
        "Fraction of the questions held out of training, selected by a hash of their text.",
        lower=0.0,
        upper=0.5,
    )
    eval_max_trajectories: int = option(
        512, "Maximum number of held-out trajectories per evaluation; 0 is all.", lower=0, upper=MOST_COUNT
    )
    bon_n: tuple[str, ...] = option(
        ("8", "16", "32", "64"), "Values of n of the Best-of-N evaluation of --bon_candidates.", kind="list"
    )
    bon_candidates: str = option(
        "",
        "Candidates file for a Best-of-N evaluation at the end of training; synthetic is that of the generated data.",
    )
