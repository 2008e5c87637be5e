"""All options of `sample`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import LARGEST_SEED, MOST_CANDIDATES, MOST_TOKENS, SYSTEM_PROMPT, DeviceConfig
from cfprm_jax.engines.options import EngineConfig
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES
from cfprm_jax.options import Options, option, refuse_unused


@dataclasses.dataclass(frozen=True)
class SampleConfig(Options):
    """Sample candidate solutions of questions from a language model.

    python -m cfprm_jax.sample --model=DIRECTORY --questions=test.jsonl --num_candidates=64 --output=CANDIDATES.jsonl

    Reads questions of MATH500, GSM-Plus or GSM8K as published, or rows {"id", "question", "answer"}. Writes one row per
    question in their order, the input of score (docs/candidates.md), and the resolved flags in OUTPUT.config.json. A
    candidate depends only on the seed, its question and its index.
    """

    MAIN_FLAGS: ClassVar = (
        *("model", "questions", "output", "num_candidates", "temperature"),
        *("top_p", "max_new_tokens", "seed", "batch_rows", "resume"),
    )

    model: str = option("", "Hugging Face directory or hub name of a language model with a chat template.")
    questions: tuple[str, ...] = option(
        (), "Question files or globs: .jsonl, .json or .parquet, plain or .gz.", kind="list"
    )
    output: str = option("", "Candidates file to write; compressed if its name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    shard: str = option(
        "",
        "INDEX/COUNT samples the share INDEX, from 0, of the questions, into OUTPUT.INDEX-of-COUNT; auto takes both "
        "from jax.distributed or the launcher (docs/running.md).",
    )
    merge: tuple[str, ...] = option(
        (), "Parts that --shard wrote, or globs: write them as one file and sample nothing.", kind="list"
    )
    num_candidates: int = option(64, "Number of candidates per question.", lower=1, upper=MOST_CANDIDATES)
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy decoding.", lower=1e-4, upper=100.0, also=0.0)
    top_p: float = option(
        1.0, "Nucleus sampling: total probability of the tokens to sample from.", lower=1e-6, upper=1.0
    )
    top_k: int = option(0, "Number of most probable tokens to sample from; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(
        1024, "Maximum length of a candidate in tokens, including its end-of-turn token.", lower=1, upper=MOST_TOKENS
    )
    seed: int = option(0, "Random seed.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the chat template; empty is none.")
    batch_rows: int = option(64, "Number of candidates decoded concurrently, over all devices.", lower=1, upper=1 << 14)
    dtype: str = option(
        "auto",
        "Dtype of weights, activations and matrix products; auto is that of the directory's weights.",
        choices=("auto", "bfloat16", "float32"),
    )
    engines: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engines.check_shard(self.shard)
        self.engines.check_sampling(self)
        if self.temperature == 0:
            refuse_unused(self, ["top_p", "top_k"], "a --temperature above 0")
