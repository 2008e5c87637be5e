"""Samples candidates for files of questions, and merges the parts of shares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.engines import options
from cfprm_jax.engines.batch import BatchEngine, RequestsWritten
from cfprm_jax.engines.engine import EngineCounts
from cfprm_jax.engines.sample_options import SampleConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts
from cfprm_jax.inference.candidates import Completion, candidates_row, encode_prompts
from cfprm_jax.inference.parts import without_unused_sharing
from cfprm_jax.inference.row_file import open_rows
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.runtime import config_files, digests, output_paths, shards
from cfprm_jax.runtime.progress import ProgressLine, counted


@dataclasses.dataclass(frozen=True)
class SampleSummary:
    """Result of sampling.

    Attributes:
      output: the file, or the part of a share.
      counts: of what this call sampled; None if the output was complete.
      questions: rows that this call wrote.
      seconds: time of sampling, without loading.
      truncated: candidates that reached the maximum length.
      empty: candidates without text.
    """

    output: pathlib.Path
    counts: EngineCounts | None
    questions: int = 0
    seconds: float = 0.0
    truncated: int = 0
    empty: int = 0


def sample_candidates(config: SampleConfig, log: Callable[[str], None]) -> SampleSummary:
    """Samples candidates of the questions into config.output, or into the part of config.shard.

    Args:
      log: receives lines about devices, model and questions.

    Raises:
      UserError: invalid options or questions. Rows written before remain in OUTPUT.partial and can be resumed.
      RequestsWritten: the requests to a batch engine are in a file, and completions are missing.
    """
    for name in ("model", "questions", "output"):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    files = expand(config.questions, "questions")
    config = dataclasses.replace(config, model=local_directory(config.model))
    config = dataclasses.replace(config, shard=shards.resolve(config.shard, os.environ))
    shard = shards.parse(config.shard)
    target = pathlib.Path(config.output) if shard is None else shard.path(config.output)
    every = read_question_files(config.questions)
    questions = [question for question in every if shard is None or shard.owns(question.question)]
    config.engines.check_requests(questions=[file.path for file in files], output=[target])
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)]),
        "questions": digests.of_paths([file.path for file in files]),
    }
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)
    total = len(questions) * config.num_candidates
    with contextlib.ExitStack() as stack:
        described = without_unused_sharing(config_files.as_dict(config))
        output = stack.enter_context(open_rows(target, config.resume, described, fingerprint))
        if output.complete:
            return SampleSummary(target, None)
        output.require("kind of engine", config.engines.kind)
        # Rows at once are the same for every share, and in one process.
        rows = min(config.batch_rows, len(every) * config.num_candidates)
        opened = stack.enter_context(
            options.opened(
                config.engines,
                config.model,
                sampling,
                device=config.device,
                batch_rows=rows,
                dtype=config.dtype,
                log=log,
            )
        )
        if config.engines.engine:
            output.require("policy", opened.engine.name)
        prompts = encode_prompts(
            questions, opened.tokenizer, opened.longest, config.max_new_tokens, config.system_prompt
        )
        log(
            f"{opened.text}\nquestions   {len(questions):,} x {config.num_candidates} candidates of at most "
            f"{config.max_new_tokens:,} tokens"
            + (f"; {counted(output.done, 'question')} already complete" if output.done else "")
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
    return SampleSummary(target, engine.counts, len(todo), progress.elapsed, cut, empty)


def merge_candidates(config: SampleConfig) -> tuple[int, int] | None:
    """Merges the parts of --shard: the bytes that one process writes.

    Returns:
      The numbers of rows and of parts; None if the output was complete.

    Raises:
      UserError: parts that are missing, or of other options, models or questions. Nothing is then written.
    """
    if not config.output:
        raise UserError("--output is empty")
    if config.model or config.shard:
        raise UserError("--merge samples nothing: leave out --model and --shard")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    found = parts.read_parts(config.merge)
    parts.require_same_flags(found, config)
    paths = config.questions or tuple(found.config["questions"])
    if digests.of_paths([file.path for file in expand(paths)]) != found.fingerprint["questions"]:
        raise UserError(
            f"the parts were sampled from other questions than those of {', '.join(paths)}: --questions names the files"
        )
    own = {**found.config, "output": config.output}
    fingerprint = own.pop("fingerprint")
    questions = read_question_files(paths)
    with open_rows(config.output, config.resume, own, fingerprint) as output:
        if output.complete:
            return None
        given = [(question.question, question.source, {"id": question.id}) for question in questions]
        # One pass that compares all rows with the questions, and one that writes: an error leaves nothing behind.
        for _ in parts.merged(found, given, parts.check_id):
            pass
        for number, row in enumerate(parts.merged(found, given, parts.check_id)):
            if number >= output.done:
                output.write(row)
    return len(questions), len(found.files)


def _show(progress: ProgressLine, counts: EngineCounts, total: int) -> None:
    # Candidates being decoded are half complete on average.
    fraction = (counts.completions + counts.live / 2) / total if counts.completions else 0.0
    progress.show(
        lambda: f"{counts.completions:,} of {total:,} candidates, {counts.tokens / progress.elapsed:,.1f} tokens/s",
        min(fraction, 1.0),
    )
