"""All options of `search`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import (
    AGGREGATIONS,
    ATTENTIONS,
    ENCODING_HELP,
    ENCODINGS,
    LARGEST_SEED,
    MOST_CANDIDATES,
    MOST_COUNT,
    MOST_TOKENS,
    SYSTEM_PROMPT,
    DeviceConfig,
    decode_escapes,
)
from cfprm_jax.engines.options import EngineConfig
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES
from cfprm_jax.options import Options, option, refuse_unused
from cfprm_jax.searching.methods import METHODS


@dataclasses.dataclass(frozen=True)
class SearchConfig(Options):
    """Search for solutions with a policy and a PRM.

    python -m cfprm_jax.search --model=POLICY --reward=RUN --questions=test.jsonl --method=beam --output=FILE.jsonl

    Writes a candidates file, the best solution first, with step_scores, tokens and the cost of each question, which bon
    reads (docs/guide/search.md).
    """

    MAIN_FLAGS: ClassVar = (
        *("model", "reward", "questions", "output", "resume"),
        *("method", "n", "beam_width", "temperature", "max_new_tokens"),
    )

    model: str = option("", "Hugging Face directory or hub name of a language model with a chat template: the policy.")
    reward: str = option("", "Run, checkpoint or Hugging Face directory of a PRM, or the http:// address of serve.")
    questions: tuple[str, ...] = option(
        (), "Question files or globs: .jsonl, .json or .parquet, plain or .gz.", kind="list"
    )
    output: str = option("", "Candidates file to write; compressed if its name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    method: str = option(
        "beam",
        "best_of_n samples n solutions; beam keeps the best n / beam_width of n; dvts has n / beam_width separate "
        "trees; greedy keeps the best of n continuations.",
        choices=METHODS,
    )
    n: int = option(
        16,
        "Number of solutions searched in parallel; at most this number are written per question.",
        lower=1,
        upper=MOST_CANDIDATES,
    )
    beam_width: int = option(4, "Number of continuations per kept solution.", lower=1, upper=MOST_CANDIDATES)
    granularity: int = option(1, "Number of steps between two evaluations of the PRM.", lower=1, upper=1000)
    lookahead: int = option(
        0, "Number of greedy steps ahead for ranking; they are discarded afterwards.", lower=0, upper=1000
    )
    max_steps: int = option(
        40, "Maximum number of search steps; solutions are then sampled to their end.", lower=1, upper=10000
    )
    aggregation: str = option("last", "Aggregation of step scores for ranking.", choices=AGGREGATIONS)
    keep_duplicates: bool = option(False, "Keep solutions with equal texts.")
    temperature: float = option(0.8, "Sampling temperature; 0 is greedy decoding.", lower=1e-4, upper=100.0, also=0.0)
    top_p: float = option(
        1.0, "Nucleus sampling: total probability of the tokens to sample from.", lower=1e-6, upper=1.0
    )
    top_k: int = option(0, "Number of most probable tokens to sample from; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(2048, "Maximum length of a solution in tokens.", lower=1, upper=MOST_TOKENS)
    seed: int = option(0, "Random seed.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the policy's chat template; empty is none.")
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", "Step separator, with escapes. Empty is that of the PRM, or \\n\\n for a server.")
    prefix_cache_tokens: int = option(
        65536, "Capacity in tokens of the PRM's cache of keys and values.", lower=0, upper=MOST_COUNT
    )
    dtype: str = option(
        "auto",
        "Dtype of activations and matrix products of policy and PRM; auto is that of the weights of each.",
        choices=("auto", "bfloat16", "float32"),
    )
    attention: str = option("auto", "Attention implementation of the PRM.", choices=ATTENTIONS)
    engines: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        decode_escapes(self.step_separator)
        if self.method not in ("beam", "dvts"):
            refuse_unused(self, ["beam_width"], f"--method=beam and dvts, not {self.method}")
        if self.method == "best_of_n":
            names = ["granularity", "lookahead", "max_steps"]
            refuse_unused(self, names, "--method=beam, dvts and greedy, not best_of_n")
        if self.temperature == 0:
            refuse_unused(self, ["top_p", "top_k"], "a --temperature above 0")
        if self.remote:
            names = ["encoding", "attention", "prefix_cache_tokens"]
            refuse_unused(self, names, "a PRM of this process; --reward names a server")

    @property
    def remote(self) -> bool:
        """Whether a server has the PRM."""
        return self.reward.startswith(("http://", "https://"))

    @property
    def separator(self) -> str:
        """The step separator for a reward on a server, with its escapes decoded."""
        return decode_escapes(self.step_separator) or "\n\n"
