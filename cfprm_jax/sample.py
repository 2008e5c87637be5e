"""python -m cfprm_jax.sample: candidates from a policy for a file of questions."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from typing import ClassVar

from cfprm_jax import flags
from cfprm_jax.config import LARGEST_SEED, MOST_CANDIDATES, MOST_TOKENS, SYSTEM_PROMPT, DeviceConfig
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.engines import options
from cfprm_jax.engines.batch import BatchEngine, RequestsWritten
from cfprm_jax.engines.engine import EngineCounts
from cfprm_jax.engines.options import EngineConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts
from cfprm_jax.inference.candidates import Completion, candidates_row, encode_prompts
from cfprm_jax.inference.parts import without_unused_sharing
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES, open_rows
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files, digests, output_paths, shards
from cfprm_jax.runtime.progress import ProgressLine, duration


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

    model: str = option("", "Hugging Face directory of a language model with a chat template.")
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


def main(config: SampleConfig) -> int:
    """Runs the command."""
    if config.merge:
        return merge(config)
    try:
        return _sample(config)
    except RequestsWritten as written:
        print(written)
        return 0


def _sample(config: SampleConfig) -> int:
    for name in ("model", "questions", "output"):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    config = dataclasses.replace(config, model=local_directory(config.model))
    config = dataclasses.replace(config, shard=shards.resolve(config.shard, os.environ))
    shard = shards.parse(config.shard)
    target = pathlib.Path(config.output) if shard is None else shard.path(config.output)
    every = read_question_files(config.questions)
    questions = [question for question in every if shard is None or shard.owns(question.question)]
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)], whole=False),
        "questions": digests.of_paths([file.path for file in expand(config.questions)], whole=True),
    }
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)
    total = len(questions) * config.num_candidates
    with contextlib.ExitStack() as stack:
        described = without_unused_sharing(config_files.as_dict(config))
        output = stack.enter_context(open_rows(target, config.resume, described, fingerprint))
        if output.complete:
            print(f"candidates  {target} is already complete")
            return 0
        output.require("kind of engine", config.engines.kind)
        # Rows at once are the same for every share, and in one process.
        rows = min(config.batch_rows, len(every) * config.num_candidates)
        opened = stack.enter_context(
            options.opened(
                *(config.engines, config.model, sampling, config.device),
                *(rows, config.dtype, functools.partial(print, flush=True)),
            )
        )
        prompts = encode_prompts(
            questions, opened.tokenizer, opened.longest, config.max_new_tokens, config.system_prompt
        )
        print(
            f"{opened.text}\nquestions   {len(questions):,} x {config.num_candidates} candidates of at most "
            f"{config.max_new_tokens:,} tokens"
            + (f"; {output.done:,} questions already complete" if output.done else ""),
            flush=True,
        )
        todo, engine = questions[output.done :], opened.engine
        progress = ProgressLine("sampling")
        show = functools.partial(_show, progress, engine.counts, total - output.done * config.num_candidates)
        cut = empty = 0
        found: dict[int, list[Completion]] = {}
        following = 0
        for place, candidates in engine.complete(prompts[output.done :], config.num_candidates, show):
            found[place] = candidates
            while following in found:
                row = candidates_row(todo[following], found[following])
                output.write(row)
                cut += sum(candidate.finish == "length" for candidate in found.pop(following))
                empty += sum(not candidate["text"].strip() for candidate in row["candidates"])
                following += 1
        progress.clear()
        if isinstance(engine, BatchEngine) and engine.missing:
            raise RequestsWritten(engine, config.engines.write_requests)
    counts = engine.counts
    print(
        f"done        {len(todo):,} questions, {counts.completions:,} candidates, {counts.tokens:,} tokens in "
        f"{duration(progress.elapsed)} ({counts.tokens / progress.elapsed:,.1f} tokens/s)\n"
        f"truncated   {cut:,} at {config.max_new_tokens:,} tokens; {empty:,} empty\n"
        f"candidates  {target}"
    )
    return 0


def merge(config: SampleConfig) -> int:
    """Put the parts of --shard together: the bytes that one process writes."""
    if not config.output:
        raise UserError("--output is empty")
    if config.model or config.shard:
        raise UserError("--merge samples nothing: leave out --model and --shard")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    found = parts.read_parts(config.merge)
    paths = config.questions or tuple(found.config["questions"])
    if digests.of_paths([file.path for file in expand(paths)], whole=True) != found.fingerprint["questions"]:
        raise UserError(
            f"the parts were sampled from other questions than those of {', '.join(paths)}: --questions names the files"
        )
    own = {**found.config, "output": config.output}
    fingerprint = own.pop("fingerprint")
    questions = read_question_files(paths)
    with open_rows(config.output, config.resume, own, fingerprint) as output:
        if output.complete:
            print(f"candidates  {config.output} is already complete")
            return 0
        given = [(question.question, question.source, {"id": question.id}) for question in questions]
        # Once to compare all rows with the questions, and once to write: what is refused leaves nothing behind.
        for _ in parts.merged(found, given, parts.check_id):
            pass
        for number, row in enumerate(parts.merged(found, given, parts.check_id)):
            if number >= output.done:
                output.write(row)
    print(f"merged      {len(questions):,} rows of {len(found.files)} parts\ncandidates  {config.output}")
    return 0


def _show(progress: ProgressLine, counts: EngineCounts, total: int) -> None:
    # Candidates being decoded are half complete on average.
    fraction = (counts.completions + counts.live / 2) / total if counts.completions else 0.0
    progress.show(
        lambda: f"{counts.completions:,} of {total:,} candidates, {counts.tokens / progress.elapsed:,.1f} tokens/s",
        min(fraction, 1.0),
    )


if __name__ == "__main__":
    sys.exit(flags.run(SampleConfig, main))
