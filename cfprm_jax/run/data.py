"""Training and held-out batches of a run, from its options and corpora."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import transformers
from jax.sharding import Mesh

from cfprm_jax.config import LossConfig
from cfprm_jax.data.corpus import Corpus, open_corpus
from cfprm_jax.data.loader import (
    Batch,
    HiddenStates,
    Loader,
    evaluation_batches,
    held_out_labels,
    without_hidden,
)
from cfprm_jax.errors import UserError
from cfprm_jax.run import summary
from cfprm_jax.run.evaluation import DISTINCT
from cfprm_jax.run.inputs import LogLine, Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import caches, digests
from cfprm_jax.runtime.progress import ProgressLine, counted, duration
from cfprm_jax.sharding import rules


class DataSplits(NamedTuple):
    """Training batches, and those of the held-out split."""

    loader: Loader
    held_out: Sequence[Batch]  # empty without a held-out split
    report: dict[str, Any]  # counts of the training corpus
    held_out_report: dict[str, Any] | None  # of the held-out corpus, if there is one
    held_out_digest: str | None = None  # of all that its metrics depend on but the model


def open_splits(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    mesh: Mesh,
    *,
    log: LogLine = lambda _: None,
    hidden: HiddenStates | None = None,
) -> DataSplits:
    """The training batches, and those of the held-out split.

    Args:
      hidden: the output of the frozen layers, which is completed for both and put into the batches.
    """
    train = training_corpus(config, sources, tokenizer, log=log)
    for line in summary.corpus(train.report):
        log(f"train       {line}")
    if config.loss.redundancy:
        refuse_without_redundancy(train.report)
    loader = training_loader(config, train, mesh, hidden)
    if hidden is not None:
        for granularity in train.granularities:
            hidden.prepare(train[granularity])
    held_out: Sequence[Batch] = []
    held_out_report = digest = None
    if held_out_fraction(config, sources) or sources.held_out:
        split = held_out_corpus(config, sources, tokenizer, train, log=log)
        held_out_report = split.report
        for line in summary.corpus(held_out_report):
            log(f"held out    {line}")
        most = config.eval.eval_max_trajectories
        rows = rules.row_multiple(mesh)
        held_out = evaluation_batches(
            split,
            config.packing,
            config.encoding,
            most,
            row_multiple=rows,
            redundancy=config.loss.redundancy,
            hidden=hidden,
        )
        # Which trajectories are drawn of a corpus follows from their number.
        digest = digests.of_json([split.identity, _count(held_out)])
    log(f"held out    {_describe_held_out(config, sources, train, held_out)}")
    if config.run.keep_best != "none":
        require_ranked(config.run.keep_best, held_out)
    return DataSplits(loader, held_out, train.report, held_out_report, digest)


def _count(held_out: Sequence[Batch]) -> int:
    return sum(batch.trajectories for batch in without_hidden(held_out))


def _describe_held_out(config: TrainConfig, sources: Sources, train: Corpus, held_out: Sequence[Batch]) -> str:
    if held_out:
        return counted(_count(held_out), "trajectory")
    fraction = held_out_fraction(config, sources)
    if not fraction:
        return "no question, so there is no evaluation"
    reader = train[train.granularities[0]]
    questions = len({reader.question(trajectory) for trajectory in range(len(reader))})
    return (
        f"none of {counted(questions, 'question')}, so there is no evaluation: --eval_fraction={fraction:g} selects "
        "questions by a hash. Raise it, or set --eval_data"
    )


def require_ranked(metric: str, held_out: Sequence[Batch]) -> None:
    """UserError if the metric of --keep_best has no value on these held-out batches.

    Args:
      metric: one of EVAL_METRICS.
    """
    distinct = metric.startswith(DISTINCT)
    labels = held_out_labels(held_out, distinct)
    positive, negative = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
    ranked = {"auroc": positive and negative, "negative_f1": negative}
    if not ranked.get(metric.removeprefix(DISTINCT), positive or negative):
        kind = "distinct " if distinct else ""
        raise UserError(
            f"--keep_best={metric} has no value here: the held-out questions have "
            f"{counted(positive, f'{kind}positive step')} and {counted(negative, f'{kind}negative step')}. Raise "
            "--eval_fraction, set --eval_data, or omit --keep_best"
        )


def held_out_fraction(config: TrainConfig, sources: Sources) -> float:
    """The share of the training questions that is held out; 0 with a held-out corpus."""
    return 0.0 if sources.held_out else config.eval.eval_fraction


def training_corpus(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    log: LogLine = lambda _: None,
) -> Corpus:
    """The tokenised training corpus, without the questions that are held out."""
    questions = "train" if held_out_fraction(config, sources) else "all"
    return _open(config, sources, tokenizer, paths=sources.train, questions=questions, log=log)


def held_out_corpus(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    train: Corpus,
    *,
    log: LogLine = lambda _: None,
) -> Corpus:
    """The tokenised held-out corpus, at the finest granularity of the training corpus."""
    finest = dataclasses.replace(config.granularity, granularities=(str(train.granularities[0]),))
    at_finest = dataclasses.replace(config, granularity=finest)
    questions = "held_out" if held_out_fraction(config, sources) else "all"
    paths = sources.held_out or sources.train
    return _open(at_finest, sources, tokenizer, paths=paths, questions=questions, log=log)


def _open(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    paths: tuple[str, ...],
    questions: str,
    log: LogLine,
) -> Corpus:
    """One side of the split, at the granularities of config, with a progress line while it is tokenised."""
    line = ProgressLine("tokenising")

    def show(share: float) -> None:
        if jax.process_index() == 0:
            line.show(lambda: f"{share:.0%} of the corpus, {duration(line.elapsed)} so far", share)

    opened = open_corpus(
        paths,
        config.read,
        config.granularity,
        config.encoding,
        tokenizer,
        cache_dir=caches.cache_directory(config.run.data_cache_dir, "corpora"),
        questions=questions,
        held_out_fraction=held_out_fraction(config, sources),
        progress=show,
        log=lambda text: log(f"corpus      {text}"),
    )
    line.clear()
    return opened


def training_loader(config: TrainConfig, corpus: Corpus, mesh: Mesh, hidden: HiddenStates | None = None) -> Loader:
    """The batches of a run over this corpus, in rows that divide over the devices and microbatches."""
    return Loader(
        corpus,
        config.granularity,
        config.packing,
        config.encoding,
        seed=config.run.seed,
        row_multiple=rules.row_multiple(mesh) * config.optimizer.accumulation,
        redundancy=second_targets(config.loss),
        hidden=hidden,
    )


def second_targets(loss: LossConfig) -> str:
    """Which redundancy targets the loader gives: those of each distinct step once where labels count so."""
    if not loss.redundancy:
        return ""
    return "node" if loss.label_weight == "node" else "trajectory"


def refuse_without_redundancy(report: Mapping[str, Any]) -> None:
    """UserError unless a corpus has both steps that are redundant and steps that are known to be of use.

    Args:
      report: of the training corpus.
    """
    counts = {
        granularity: (entry["redundant_steps"], entry["useful_steps"])
        for granularity, entry in report["granularities"].items()
    }
    if not any(redundant and useful for redundant, useful in counts.values()):
        found = "; ".join(f"C={g}: {r:,} redundant, {u:,} of use" for g, (r, u) in counts.items())
        raise UserError(
            f"--redundancy_weight needs steps rated 0 and steps rated 1, as PRM800K has among its alternatives, or a "
            f'field "redundancy"; {", ".join(report["files"])} has none of one kind ({found})'
        )
