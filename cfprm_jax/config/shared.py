"""Choices, bounds and help texts that several options share."""

from __future__ import annotations

from cfprm_jax.errors import UserError
from cfprm_jax.options import whole_number

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
EVAL_METRICS = ("loss", "step_accuracy", "negative_f1", "auroc", "distinct_negative_f1", "distinct_auroc")
"""Held-out metrics that --keep_best can rank checkpoints by."""
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


def finest_first(granularity: Granularity) -> tuple[bool, int | str]:
    """Sort key: sizes, finest first, then "given", then "whole"."""
    return isinstance(granularity, str), granularity


def decode_escapes(text: str) -> str:
    r"""Backslash-n, -t, -r and -backslash as typed in a shell or a flag file are decoded."""
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
