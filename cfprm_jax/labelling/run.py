"""What the `label` command does: questions in, rollouts in rounds, rows and a summary out."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, cast

from cfprm_jax.data.formats.files import expand, require, rows
from cfprm_jax.data.steps import split_steps
from cfprm_jax.engines import options as engines
from cfprm_jax.engines.batch import BatchEngine, RequestsWritten
from cfprm_jax.engines.engine import Engine, PrefixEncoder, open_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import Grader
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts
from cfprm_jax.inference.row_file import RESOLVED, open_rows
from cfprm_jax.inference.sampler import Sampling
from cfprm_jax.labelling import first_error, judge
from cfprm_jax.labelling import rows as row_forms
from cfprm_jax.labelling.inputs import InputSolution, Labelled, read_questions, read_solutions, with_correctness
from cfprm_jax.labelling.ledger import Ledger
from cfprm_jax.labelling.options import LabelConfig
from cfprm_jax.labelling.rollouts import Method, Outcome, Prefix
from cfprm_jax.labelling.rounds import Rounds
from cfprm_jax.labelling.summary import Summary
from cfprm_jax.labelling.tree import Cut, SearchTree, TreeSettings, search
from cfprm_jax.runtime import atomic, config_files, digests, shards
from cfprm_jax.runtime.progress import ProgressLine, counted

Log = Callable[[str], None]


class BadRows:
    """Counts malformed rows of the input, which are skipped, up to a most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.skipped: list[str] = []

    def __call__(self, error: str) -> None:
        """Skip a row with this error, or raise it."""
        if len(self.skipped) >= self._most:
            allowed = f" (after {self._most} that --max_bad_rows allows)" if self._most else ""
            raise UserError(f"{error}{allowed}")
        self.skipped.append(error)


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
    fingerprint = {
        "model": digests.of_paths([pathlib.Path(config.model)]),
        "input": digests.of_paths([file.path for file in files]),
    }
    _require_new(output, config.resume)
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
            log=log,
        )


def merge(config: LabelConfig, log: Log) -> dict[str, Any]:
    """Write the rows and the log of all parts of --shard; the content of label.json.

    The rows are made from the parts' logs and the input, as one process makes them: nothing is rolled.

    Raises:
      UserError: parts that are missing, not complete, or of other flags, models, inputs or policies. The rows are
        then not written.
    """
    outputs = [file.path for file in expand(config.merge, "merge") if not base_name(file.path).endswith(".rollouts")]
    found = parts.read_parts([f"{base_name(path)}.rollouts.jsonl" for path in outputs])
    policy = _policy(outputs)
    common = {name: value for name, value in found.config.items() if name not in ("fingerprint", RESOLVED)}
    common |= {"output": config.output, "input": list(config.input) or common["input"]}
    common |= {"model": config.model or common["model"]}
    fingerprint, resume = found.fingerprint, config.resume
    config = config_files.from_dict(LabelConfig, common)
    parts.require_input(found, config.input)
    output = pathlib.Path(config.output)
    base = base_name(output)
    _require_new(output, resume)
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
        log=log,
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
    log: Log,
) -> dict[str, Any]:
    """Roll what done lacks; write the rows, and then the summary, which is returned.

    Args:
      missing: the error where completions of a batch engine are missing; no rows are then written.
    """
    output = _output(config)
    with contextlib.ExitStack() as stack:
        grader = stack.enter_context(Grader(config.grader, config.grader_seconds, config.grader_processes))
        labeller = _Labeller(config, opened, grader, done=done, write=write, log=log)
        with _written(output) as stream:
            for row in labeller.rows():
                stream.write(atomic.encode_json(row))
            # A share can have few rollouts, so that its last ones do not count by themselves.
            labeller.ledger.counts.check(config.what.max_truncated, last=not config.shard)
            if isinstance(opened.engine, BatchEngine) and opened.engine.missing:
                raise missing(opened.engine)
    summary = {"config": config_files.as_dict(config), **labeller.report(), "off_policy": off_policy}
    atomic.write_json(f"{base_name(output)}.label.json", summary)
    return summary


def _output(config: LabelConfig) -> pathlib.Path:
    shard = shards.parse(config.shard)
    return pathlib.Path(config.output) if shard is None else shard.path(config.output)


def _require_new(output: pathlib.Path, resume: str) -> None:
    if output.exists() and resume == "never":
        raise UserError(f"--output={output} already exists: choose another file, or remove it")


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


def consensus(config: LabelConfig) -> dict[str, Any]:
    """Requests to a judge about labelled rows, or the rows with which it agrees; counts of either.

    Raises:
      UserError: rows without labels, or verdicts that are none.
    """
    require(input=config.input, judge=config.consensus.judge)
    labelled = _labelled_rows(config)
    requests = config.consensus.write_judge_requests
    if requests:
        made = (judge.request(row, config.consensus.judge_model, config.consensus.judge_tokens) for row in labelled)
        content = [atomic.encode_json(row) for row in made]
        atomic.write_bytes(requests, b"".join(content))
        return {"requests": len(content)}
    agreement = judge.Consensus()
    verdicts = judge.read_verdicts(config.consensus.judge)
    with _written(pathlib.Path(config.output)) as stream:
        for row in agreement.filter(labelled, verdicts):
            stream.write(atomic.encode_json(row))
    summary = {"config": config_files.as_dict(config), **agreement.report()}
    atomic.write_json(f"{base_name(config.output)}.label.json", summary)
    return summary


def base_name(output: str | pathlib.Path) -> str:
    """An output without its suffixes, which the names of the files beside it begin with."""
    path = pathlib.Path(output)
    return str(path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl")))


class _Labeller:
    """The rows of one run."""

    def __init__(
        self,
        config: LabelConfig,
        opened: engines.Opened,
        grader: Grader,
        *,
        done: Iterable[dict[str, Any]],
        write: Callable[[dict[str, Any]], object],
        log: Log,
    ) -> None:
        self._config, self._grader, self._log = config, grader, log
        self._engine: Engine = opened.engine
        room = opened.longest[0] - config.max_new_tokens
        if room < 1:
            raise UserError(
                f"--max_new_tokens={config.max_new_tokens} leaves no room in the model's {opened.longest[1]}="
                f"{opened.longest[0]}"
            )
        self._encoder = PrefixEncoder(opened.tokenizer, room, config.system_prompt)
        self._tree = config.what.method == "tree"
        self._bad, self._read = BadRows(config.max_bad_rows), 0
        self.summary = Summary()
        self.ledger = Ledger(
            done,
            write,
            encoder=self._encoder,
            engine=self._engine,
            grader=grader,
            rollouts=config.what.rollouts,
            join=self._join,
            pieces=lambda text: split_steps(text, config.separator),
            keep_texts=self._tree or config.what.keep_texts,
        )
        self._progress = ProgressLine("rolling")

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows, in the order of the input; those that wait for completions elsewhere are missing."""
        read = read_questions if self._tree else None
        questions = (
            read(self._config.input, self._bad)
            if read is not None
            else read_solutions(self._config.input, self._config.separator, self._bad)
        )
        shard = shards.parse(self._config.shard)
        own = (one for one in self._counted(questions) if shard is None or shard.owns(one.question.question))
        while chunk := list(itertools.islice(own, self._config.what.questions_at_once)):
            self.summary.questions += len(chunk)
            for row in self._trees(chunk) if self._tree else self._solutions(chunk):
                self.summary.rows += 1
                yield row
        self._progress.clear()
        if not self._read:
            raise UserError(f"{', '.join(self._config.input)}: no question that could be read")

    def _counted(self, questions: Iterable[Labelled]) -> Iterator[Labelled]:
        for one in questions:
            self._read += 1
            yield one

    def report(self) -> dict[str, Any]:
        """For label.json."""
        counts, engine = self.ledger.counts, self._engine.counts
        return {
            "policy": self._engine.name,
            "rollouts": counts.rollouts,
            "tokens": counts.tokens,
            "prefixes": counts.prefixes,
            "cut_rollouts": counts.cut,
            "rollouts_without_verdict": counts.without_verdict,
            "prefixes_too_long": counts.too_long,
            **self.summary.as_dict(counts.rollouts),
            "bad_rows": self._bad.skipped,
            # Of this run alone: a resumed one computes nothing twice.
            "this_run": {
                "rollouts": engine.completions,
                "tokens": engine.tokens,
                "prompt_tokens_one_prefill_a_rollout": engine.prompt_tokens,
                "prompt_tokens_computed": engine.prefilled,
                "padding_tokens_computed": engine.padding,
                "share_computed": engine.prefilled / engine.prompt_tokens
                if engine.prefilled is not None and engine.prompt_tokens
                else None,
                "retries": engine.retries,
            },
        }

    def _run(self, chunk: Sequence[Labelled], methods: Sequence[tuple[int, Method[Any]]]) -> Rounds[Any]:
        rounds: Rounds[Any] = Rounds(methods)
        questions = [one.question for one in chunk]

        def roll(wanted: Sequence[tuple[int, Prefix]]) -> Iterator[tuple[tuple[int, Prefix], Outcome]]:
            yield from self.ledger.roll(questions, wanted, self._show)
            self.ledger.counts.check(self._config.what.max_truncated, last=False)

        rounds.run(roll)
        return rounds

    def _solutions(self, chunk: Sequence[Labelled]) -> Iterator[dict[str, Any]]:
        chunk = [one for one in map(self._graded, chunk) if self._kept(one)]
        for one in chunk:
            steps = {solution.number: solution.steps for solution in one.solutions}
            for number, candidate in enumerate(one.candidates):
                if candidate.steps is None:
                    self.summary.split.add(candidate.text or "", steps.get(number, ()))
        pairs = [(number, solution) for number, one in enumerate(chunk) for solution in one.solutions]
        rounds = self._run(chunk, [(number, self._method(solution)) for number, solution in pairs])
        for place, (number, solution) in enumerate(pairs):
            if place in rounds.results:
                outcomes = rounds.results[place]
                self.summary.add_solution(solution, outcomes, self._config.what.rollouts)
                yield row_forms.solution_row(chunk[number], solution, outcomes, self._engine.name)

    def _trees(self, chunk: Sequence[Labelled]) -> Iterator[dict[str, Any]]:
        tree = self._config.tree
        settings = TreeSettings(tree.alpha, tree.beta, tree.tree_length, tree.c_puct, tree.searches)
        rounds = self._run(chunk, [(number, search(settings, self._cutter)) for number in range(len(chunk))])
        for number, one in enumerate(chunk):
            if number not in rounds.results:
                continue
            grown: SearchTree = rounds.results[number]
            rate = grown.root.outcome.rate
            if rate is None or not self._within(rate):
                self.summary.omitted_questions += 1
                continue
            self.summary.add_tree(grown, self._config.what.rollouts)
            yield from self._tree_rows(one, grown)

    def _tree_rows(self, one: Labelled, grown: SearchTree) -> Iterator[dict[str, Any]]:
        config = self._config.tree
        if config.write == "math_aps":
            yield row_forms.math_aps_row(one.question, grown, "" if config.pieces else self._config.separator)
        elif config.write == "rest_mcts":
            yield from row_forms.value_rows(one.question, grown)
        else:
            for row in row_forms.tree_rows(one.question, grown, self._engine.name, config.tree_rows == "edges"):
                if config.pieces:  # what remains is counted in steps
                    row |= {"remaining_steps": None, "question_remaining_steps": None}
                yield row

    def _method(self, solution: InputSolution) -> Method[list[Outcome | None]]:
        what = self._config.what
        if what.method == "bisect":
            if solution.correct is False:
                return first_error.bisect(solution.steps)
            if not (what.roll_right and solution.correct):
                return first_error.nothing(solution.steps)
        return first_error.sweep(solution.steps, what.stop_at_zero)

    def _graded(self, one: Labelled) -> Labelled:
        """Correctness of every candidate: its own, or by its answer."""
        graded = [
            candidate.correct
            if candidate.correct is not None
            else self._grader.verdicts([(candidate, one.question.answer, one.question.dataset)])[0]
            for candidate in one.candidates
        ]
        return with_correctness(one, graded)

    def _kept(self, one: Labelled) -> bool:
        kept = not one.rate[1] or self._within(one.rate[0] / one.rate[1])
        self.summary.omitted_questions += not kept
        return kept

    def _within(self, rate: float) -> bool:
        return self._config.what.min_rate <= rate <= self._config.what.max_rate

    def _join(self, prefix: Prefix) -> str:
        if self._tree and self._config.tree.pieces:
            return "".join(prefix)
        return self._config.separator.join([*prefix, ""]) if prefix else ""

    def _cutter(self, first: Outcome) -> Cut:
        if not self._config.tree.pieces:
            for rollout in first.rollouts:
                self.summary.split.add(rollout.text or "", split_steps(rollout.text or "", self._config.separator))
            return lambda _, text: split_steps(text, self._config.separator)
        mean = sum(rollout.tokens for rollout in first.rollouts) / max(len(first.rollouts), 1)
        size = max(round(mean / self._config.tree.pieces), 1)
        return lambda _, text: self._encoder.pieces(text, size)

    def _show(self) -> None:
        counts, progress = self._engine.counts, self._progress
        progress.show(
            lambda: (
                f"{self.summary.questions:,} questions begun, {counts.completions:,} rollouts, "
                f"{counts.tokens / progress.elapsed:,.1f} tokens/s"
            )
        )


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
            known = described.get("fingerprint", {}).get("model")
            if known is not None and known != model:
                return (
                    f"the solutions of {file.name} are of {described.get('model')}, and the rollouts of "
                    f"{config.model}: counts are of the latter's continuations"
                )
    return None


def _labelled_rows(config: LabelConfig) -> Iterator[dict[str, Any]]:
    bad = BadRows(config.max_bad_rows)
    for file in expand(config.input):
        for row in rows(file):
            where = f"{file.name}:{row.line}"
            if row.data is None:
                bad(f"{where}: {row.reason}")
            elif not all(isinstance(row.data.get(name), kind) for name, kind in _FIELDS):
                bad(f'{where}: no "prompt", "completions" and "labels" of a labelled row')
            else:
                yield row.data


_FIELDS = (("prompt", str), ("completions", list), ("labels", list))


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
