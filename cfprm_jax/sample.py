"""python -m cfprm_jax.sample: candidates from a policy for a file of questions."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import functools
import pathlib
import sys

from cfprm_jax import flags
from cfprm_jax.config import (
    LARGEST_SEED,
    MOST_CANDIDATES,
    MOST_TOKENS,
    SYSTEM_PROMPT,
    DeviceConfig,
    Options,
    option,
)
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.errors import UserError
from cfprm_jax.inference.candidates import candidates_row, encode_prompts
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.inference.row_file import RESUMES, open_rows
from cfprm_jax.inference.sampler import Sampler, Sampling
from cfprm_jax.runtime import config_files, devices, digests, output_paths
from cfprm_jax.runtime.progress import ProgressLine, duration
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class SampleConfig(Options):
    """Sample candidate solutions of questions from a language model.

    python -m cfprm_jax.sample --model=DIRECTORY --questions=test.jsonl --num_candidates=64 --output=CANDIDATES.jsonl

    Questions are those of MATH500, GSM-Plus or GSM8K as published, or {"id", "question", "answer"}. Writes a row a
    question in their order, which score reads (docs/candidates.md), and the resolved flags beside them. A candidate
    depends on the seed, its question and its number alone.
    """

    model: str = option("", "Hugging Face directory of a language model with a chat template.")
    questions: tuple[str, ...] = option(
        (), "Files of questions, or globs: .jsonl, .json or .parquet, plain or .gz.", kind="list"
    )
    output: str = option("", "Candidates file to write; compressed if its name ends in .gz.")
    resume: str = option(
        "never",
        "never refuses an --output that exists or was begun, auto goes on with it or starts, always needs it there.",
        choices=RESUMES,
    )
    num_candidates: int = option(64, "Candidates a question.", lower=1, upper=MOST_CANDIDATES)
    temperature: float = option(
        1.0, "Logits are divided by it; 0 takes the most probable token.", lower=1e-4, upper=100.0, also=0.0
    )
    top_p: float = option(
        1.0, "Tokens are drawn among the most probable ones with this mass together.", lower=1e-6, upper=1.0
    )
    top_k: int = option(0, "Tokens are drawn among so many most probable ones; 0 is all.", lower=0, upper=MOST_TOKENS)
    max_new_tokens: int = option(
        1024, "Most tokens of a candidate, its end-of-turn token included.", lower=1, upper=MOST_TOKENS
    )
    seed: int = option(0, "Seed of the draws.", lower=0, upper=LARGEST_SEED)
    system_prompt: str = option(SYSTEM_PROMPT, "System message of the chat template; empty is none.")
    batch_rows: int = option(64, "Candidates that are decoded at once, over all devices.", lower=1, upper=1 << 14)
    dtype: str = option(
        "auto",
        "Type of weights, activations and matrix products; auto is what the directory's weights are.",
        choices=("auto", "bfloat16", "float32"),
    )
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: SampleConfig) -> int:
    """The command."""
    for name in ("model", "questions", "output"):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    questions = read_question_files(config.questions)
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)], whole=False),
        "questions": digests.of_paths([file.path for file in expand(config.questions)], whole=True),
    }
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(config.output, config.resume, config_files.as_dict(config), fingerprint) as output,
    ):
        if output.complete:
            print(f"candidates  {config.output} is complete already")
            return 0
        print(f"devices     {devices.describe(chosen)}", flush=True)
        policy = open_policy(config.model, config.dtype, mesh)
        prompts = encode_prompts(questions, policy, config.max_new_tokens, config.system_prompt)
        wanted = len(questions) * config.num_candidates
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)
        sampler = Sampler(policy, sampling, min(config.batch_rows, wanted), mesh)
        print(
            f"model       {config.model}, {policy.config.dtype}, stops at the tokens "
            f"{', '.join(map(str, policy.stops))}\n"
            f"questions   {len(questions):,} x {config.num_candidates} candidates of at most "
            f"{config.max_new_tokens:,} tokens"
            + (f"; {output.done:,} questions were done before" if output.done else "")
            + f"\nrows        {sampler.rows} at once",
            flush=True,
        )
        progress = ProgressLine("sampling")
        show = functools.partial(_show, progress, sampler, wanted - output.done * config.num_candidates)
        cut = empty = 0
        todo = questions[output.done :]
        sampled = sampler.sample(prompts[output.done :], config.num_candidates, show)
        for question, candidates in zip(todo, sampled, strict=True):
            row = candidates_row(question, candidates, policy)
            output.write(row)
            cut += sum(candidate.finish == "length" for candidate in candidates)
            empty += sum(not candidate["text"].strip() for candidate in row["candidates"])
        progress.clear()
    counts = sampler.counts
    print(
        f"done        {len(todo):,} questions, {counts.candidates:,} candidates, {counts.tokens:,} tokens in "
        f"{duration(progress.elapsed)} ({counts.tokens / progress.elapsed:,.1f} tokens/s)\n"
        f"cut         {cut:,} at {config.max_new_tokens:,} tokens; {empty:,} without a text\n"
        f"candidates  {config.output}"
    )
    return 0


def _show(progress: ProgressLine, sampler: Sampler, wanted: int) -> None:
    counts = sampler.counts
    # Candidates under way are half done on average.
    fraction = (counts.candidates + counts.live / 2) / wanted if counts.candidates else 0.0
    progress.show(
        lambda: f"{counts.candidates:,} of {wanted:,} candidates, {counts.tokens / progress.elapsed:,.1f} tokens/s",
        fraction,
    )


if __name__ == "__main__":
    sys.exit(flags.run(SampleConfig, main))
