"""What the `label` command does: questions in, rollouts in rounds, rows and a summary out."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from cfprm_jax.data.formats.files import expand, require, rows
from cfprm_jax.engines import options as engines
from cfprm_jax.engines.batch import BatchEngine, RequestsWritten
from cfprm_jax.engines.engine import open_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import Grader
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts
from cfprm_jax.inference.row_file import RESOLVED, open_rows
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.labelling import judge
from cfprm_jax.labelling.labeller import BadRows, Labeller
from cfprm_jax.labelling.options import LabelConfig
from cfprm_jax.runtime import atomic, config_files, digests, output_paths, shards
from cfprm_jax.runtime.progress import ProgressLine, counted

Log = Callable[[str], None]


def label(config: LabelConfig, log: Log) -> dict[str, Any]:
    """Roll and write; the content of label.json.

    Of a --shard, the rows, the log and the summary are those of its questions, in files named after the share.

    Raises:
      UserError: bad input, an engine that fails, or too many cut rollouts. What was rolled is in the log by then.
      RequestsWritten: rollouts are to be made elsewhere first.
    """
    files = expand(config.input, "input")
    config = dataclasses.replace(config, model=local_directory(config.model))
    config = dataclasses.replace(config, shard=shards.resolve(config.shard, os.environ))
    output = _output(config)
    base = base_name(output)
    inputs = [file.path for file in files]
    output_paths.require_no_input("--output", output, input=inputs)
    config.engines.check_requests(input=inputs, output=[output])
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)]),
        "input": digests.of_paths(inputs),
    }
    _require_own(output, config.resume)
    engine_config, sampling = config.engines, _sampling(config)
    described = parts.without_unused_sharing(config_files.as_dict(config))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(open_rows(f"{base}.rollouts.jsonl", config.resume, described, fingerprint))
        done = list(held.rows())
        if held.complete:
            log(f"rollouts    {base}.rollouts.jsonl is complete already")
            if output.exists() and pathlib.Path(f"{base}.label.json").exists():
                return json.loads(pathlib.Path(f"{base}.label.json").read_text(encoding="utf-8"))
            done = [row for file in expand([f"{base}.rollouts.jsonl"]) for row in parts.rows_of(file)]
        else:
            held.require("kind of engine", engine_config.kind)
        opened = stack.enter_context(
            engines.opened(
                engine_config,
                config.model,
                sampling,
                device=config.device,
                batch_rows=config.batch_rows,
                dtype=config.dtype,
                log=log,
            )
        )
        if engine_config.engine and not held.complete:
            held.require("policy", opened.engine.name)
        log(opened.text)
        log(f"method      {config.what.method}, {config.what.rollouts} rollouts a prefix")
        if done:
            log(f"resumed     {len(done):,} prefixes were rolled before")
        if other := _other_policy(config, fingerprint["model"]):
            log(f"note        {other}")
        return _write_rows(
            config,
            opened,
            done=done,
            write=held.write if not held.complete else _no_write,
            missing=lambda engine: RequestsWritten(engine, engine_config.write_requests),
            off_policy=other,
        )


def merge(config: LabelConfig, log: Log) -> dict[str, Any]:
    """Write the rows and the log of all parts of --shard; the content of label.json.

    The rows are made from the parts' logs and the input, as one process makes them: nothing is rolled.

    Raises:
      UserError: parts that are missing, not complete, or of other flags, models, inputs or policies; more bad rows or
        cut rollouts than this command's flags allow, or where it has none, the largest of the parts'. The rows are
        then not written.
    """
    outputs = [file.path for file in expand(config.merge, "merge") if not base_name(file.path).endswith(".rollouts")]
    found = parts.read_parts([f"{base_name(path)}.rollouts.jsonl" for path in outputs])
    parts.require_same_flags(found, config)
    policy = _policy(outputs)
    common = {name: value for name, value in found.config.items() if name not in ("fingerprint", RESOLVED)}
    common |= {"output": config.output, "input": list(config.input) or common["input"]}
    common |= {"model": config.model or common["model"]}
    own, default = config_files.as_dict(config), config_files.as_dict(LabelConfig())
    for name in ("max_bad_rows", "max_truncated", "grader_processes"):
        common[name] = found.largest(name) if own[name] == default[name] else own[name]
    fingerprint, resume = found.fingerprint, config.resume
    config = config_files.from_dict(LabelConfig, common)
    parts.require_input(found, config.input)
    output = pathlib.Path(config.output)
    base = base_name(output)
    _require_own(output, resume)
    output_paths.require_no_input("--output", output, input=[file.path for file in expand(config.input)], merge=outputs)
    described = parts.without_unused_sharing(config_files.as_dict(config))
    rows_of_parts = [row for file in found.files for row in parts.rows_of(file)]
    log(f"rollouts    of {counted(len(found.files), 'part')}: {counted(len(rows_of_parts), 'prefix')}")
    engine = BatchEngine(policy, _sampling(config), None)
    opened = engines.Opened(engine, *open_tokenizer(config.model), f"model       {policy}, by the logs of the parts")
    inputs = ", ".join(config.input)
    summary = _write_rows(
        config,
        opened,
        done=rows_of_parts,
        write=_no_write,
        missing=lambda engine: UserError(f"the parts lack {counted(len(engine.missing), 'rollout')} of {inputs}"),
        off_policy=_other_policy(config, fingerprint["model"]),
    )
    # Last, so that a refused merge leaves nothing behind.
    with open_rows(f"{base}.rollouts.jsonl", resume, described, fingerprint) as held:
        if not held.complete:
            for row in rows_of_parts[held.done :]:
                held.write(row)
    return summary


def _write_rows(
    config: LabelConfig,
    opened: engines.Opened,
    *,
    done: Sequence[dict[str, Any]],
    write: Callable[[dict[str, Any]], object],
    missing: Callable[[BatchEngine], Exception],
    off_policy: str | None,
) -> dict[str, Any]:
    """Roll what done lacks; write the rows, and then the summary, which is returned.

    Args:
      missing: the error where completions of a batch engine are missing; no rows are then written.
    """
    output = _output(config)
    with contextlib.ExitStack() as stack:
        grader = stack.enter_context(Grader(config.grader, config.grader_seconds, config.grader_processes))
        labeller = Labeller(config, opened, grader, done=done, write=write)
        with _written(output) as stream:
            for row in labeller.rows():
                stream.write(atomic.encode_json(row))
            if isinstance(opened.engine, BatchEngine) and opened.engine.missing:
                raise missing(opened.engine)
            # A share can have few rollouts, so that its last ones do not count by themselves.
            labeller.ledger.counts.check(config.what.max_truncated, last=not config.shard)
    summary = {"config": config_files.as_dict(config), **labeller.report(), "off_policy": off_policy}
    atomic.write_json(f"{base_name(output)}.label.json", summary)
    return summary


def _output(config: LabelConfig) -> pathlib.Path:
    shard = shards.parse(config.shard)
    return pathlib.Path(config.output) if shard is None else shard.path(config.output)


def _require_new(output: pathlib.Path, resume: str, flag: str = "output") -> None:
    if output.exists() and resume == "never":
        raise UserError(f"--{flag}={output} already exists: choose another file, or remove it")


def _require_own(output: pathlib.Path, resume: str) -> None:
    """UserError for an output that is there, unless an earlier call wrote it, whose log or summary is beside it."""
    base = base_name(output)
    own = (f"{base}.rollouts.jsonl", f"{base}.rollouts.jsonl.partial", f"{base}.label.json")
    _require_new(output, resume if any(pathlib.Path(path).exists() for path in own) else "never")


def _policy(outputs: Sequence[pathlib.Path]) -> str:
    """The policy of parts.

    Raises:
      UserError: a part without rows or summary, or parts of two policies.
    """
    policies: dict[str, pathlib.Path] = {}
    for path in outputs:
        beside = pathlib.Path(f"{base_name(path)}.label.json")
        try:
            policy = json.loads(beside.read_text(encoding="utf-8"))["policy"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no complete part: {beside.name} is missing or damaged ({error}); run that share again "
                "with --resume=auto"
            ) from error
        policies.setdefault(policy, path)
    if len(policies) > 1:
        one, other = list(policies.items())[:2]
        raise UserError(f"{one[1]} is of the policy {one[0]!r:.80}, {other[1]} of {other[0]!r:.80}")
    return next(iter(policies))


def consensus(config: LabelConfig, log: Log) -> dict[str, Any]:
    """Requests to a judge about labelled rows, or the rows with which it agrees; counts of either.

    Raises:
      UserError: rows without labels, verdicts that are none, or an output that is there or is an input.
    """
    require(input=config.input, judge=config.consensus.judge)
    flag = "write_judge_requests" if config.consensus.write_judge_requests else "output"
    output = pathlib.Path(config.consensus.write_judge_requests or config.output)
    _require_new(output, config.resume, flag)
    judged = [file.path for file in expand(config.consensus.judge)] if config.consensus.judge else []
    inputs = [file.path for file in expand(config.input)]
    output_paths.require_no_input(f"--{flag}", output, input=inputs, judge=judged)
    bad, requests = BadRows(config.max_bad_rows), config.consensus.write_judge_requests
    labelled = _labelled_rows(config, bad)
    described = {"config": config_files.as_dict(config)}
    if requests:
        log(f"requests    about the rows of {', '.join(config.input)}")
        made = (judge.request(row, config.consensus.judge_model, config.consensus.judge_tokens) for row in labelled)
        content = [atomic.encode_json(row) for row in made]
        summary = {**described, "requests": len(content), "bad_rows": bad.skipped}
        atomic.write_bytes(requests, b"".join(content))
        atomic.write_json(f"{base_name(requests)}.label.json", summary)
        return summary
    agreement, verdicts = judge.Consensus(), judge.read_verdicts(config.consensus.judge)
    log(f"verdicts    {len(verdicts):,} of {', '.join(config.consensus.judge)}")
    with _written(pathlib.Path(config.output)) as stream:
        for row in agreement.filter(labelled, verdicts):
            stream.write(atomic.encode_json(row))
    summary = {**described, **agreement.report(), "bad_rows": bad.skipped}
    atomic.write_json(f"{base_name(config.output)}.label.json", summary)
    return summary


def base_name(output: str | pathlib.Path) -> str:
    """An output without its suffixes, which the names of the files beside it begin with."""
    path = pathlib.Path(output)
    return str(path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl")))


def _sampling(config: LabelConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p, config.max_new_tokens, config.seed)


def _no_write(row: dict[str, Any]) -> None:
    raise UserError(f"the log of rollouts is complete, but lacks {row['name']!r:.80}: remove it to start again")


def _other_policy(config: LabelConfig, model: str) -> str | None:
    """Whether the solutions are of another policy than the rollouts, according to the files beside them."""
    for file in expand(config.input):
        beside = file.path.with_name(f"{file.path.name}.config.json")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            described = json.loads(beside.read_text(encoding="utf-8"))
            fingerprint = described.get("fingerprint", {})
            known = fingerprint.get("model")
            # Of sample and search, which read questions; the model of other commands, as score, is a PRM.
            if "questions" in fingerprint and known is not None and known != model:
                return (
                    f"the solutions of {file.name} are of {described.get('model')}, and the rollouts of "
                    f"{config.model}: counts are of the latter's continuations"
                )
    return None


def _labelled_rows(config: LabelConfig, bad: BadRows) -> Iterator[dict[str, Any]]:
    """The rows of the input; bad counts the others."""
    progress, read, names = ProgressLine("reading"), 0, set[str]()
    for file in expand(config.input):
        for row in rows(file):
            read += 1
            progress.show(lambda read=read: f"{read:,} rows, {read / progress.elapsed:,.1f} rows/s")  # type: ignore[misc]
            where = f"{file.name}:{row.line}"
            if row.data is None:
                bad(f"{where}: {row.reason}")
            elif fault := _fault(row.data):
                bad(f"{where}: {fault}")
            elif (name := judge.name(row.data)) in names:
                bad(f'{where}: a second row called {name!r:.80} by its "source" and "candidate"')
            else:
                names.add(name)
                yield row.data
    progress.clear()


def _fault(row: dict[str, Any]) -> str | None:
    """Why a row is no labelled one; None if it is."""
    try:
        judge.check(row)
    except UserError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _written(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes that of path at the end, or nothing if that is not reached."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.writing(path) as raw, contextlib.ExitStack() as stack:
        stream = cast(BinaryIO, raw)
        if path.suffix == ".gz":
            # No name and no time inside: the same input gives the same bytes.
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=raw, mtime=0)
            stream = cast(BinaryIO, stack.enter_context(packed))
        yield stream
