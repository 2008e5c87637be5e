"""What a run reads before its first step: files, the network's shape, batches, candidates to choose from."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import transformers
from jax.sharding import Mesh

from cfprm_jax.config import GranularityConfig, LossConfig
from cfprm_jax.data.candidates import Question, read_candidates
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.loader import Batch, Loader, evaluation_batches
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import parse_sizes
from cfprm_jax.huggingface import loading
from cfprm_jax.models import lora, parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.run import summary, warm_start
from cfprm_jax.run.options import SYNTHETIC, TrainConfig
from cfprm_jax.runtime import caches
from cfprm_jax.runtime.progress import ProgressLine, duration
from cfprm_jax.sharding import rules

Say = Callable[[str], None]


class Sources(NamedTuple):
    """The files behind the options, with what "synthetic" stands for written out."""

    model: pathlib.Path
    init: str  # pretrained or random
    train: tuple[str, ...]
    held_out: tuple[str, ...]  # empty: a share of the questions of train
    candidates: str


class Network(NamedTuple):
    """The PRM, without any weights."""

    config: PRMConfig
    raw: dict[str, Any]  # the backbone's config.json
    adapters: Lora | None  # None: the whole network is trained


class Data(NamedTuple):
    """Where batches come from."""

    loader: Loader
    held_out: list[Batch]
    report: dict[str, Any]  # of the training corpus


def materialise(config: TrainConfig, output_dir: pathlib.Path) -> Sources:
    """The files to use; the synthetic ones are written, the same for the same seed, into output_dir/synthetic."""
    sources = Sources(
        pathlib.Path(config.model.model),
        config.model.init,
        config.train_data,
        config.eval.eval_data,
        config.eval.bon_candidates,
    )
    synthetic_data = config.train_data == (SYNTHETIC,)
    if not (synthetic_data or SYNTHETIC in (config.model.model, config.eval.bon_candidates)):
        return sources
    from cfprm_jax import synthetic  # only a run that wants it pays for it

    made = synthetic.materialise(output_dir / SYNTHETIC, config.run.seed)
    if synthetic_data:
        sources = sources._replace(train=(str(made.train),), held_out=sources.held_out or (str(made.held_out),))
    if config.model.model == SYNTHETIC:
        sources = sources._replace(model=pathlib.Path(made.model), init="random")
    if config.eval.bon_candidates == SYNTHETIC:
        sources = sources._replace(candidates=str(made.candidates))
    return sources


def go_on_from_prm(config: TrainConfig, sources: Sources, say: Say) -> TrainConfig:
    """The options completed by what the directory of a PRM says, where that is what training begins with."""
    if sources.init == "random":
        return config
    adopted = warm_start.adopt(sources.model, config.model, config.encoding, config.given, config.loss.redundancy)
    for line in adopted.lines:
        say(f"goes on     {line}")
    return dataclasses.replace(config, model=adopted.model, encoding=adopted.encoding)


def open_network(config: TrainConfig, sources: Sources, mesh: Mesh) -> Network:
    """The shape of the network, before any weight is read. UserError for a mesh that does not divide it."""
    backbone, raw = loading.read_config(sources.model)
    backbone.refuse_length(config.encoding.max_length)
    model = config.model
    attention = rules.attention_backend(model.attention, mesh, backbone, model.dtype)
    network = PRMConfig(backbone, model.head, model.dtype, attention, model.remat, config.loss.redundancy)
    own = lora.parse(config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_targets)
    rules.param_shardings(mesh, parameters.param_specs(network))
    return Network(network, raw, own)


def open_data(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    mesh: Mesh,
    say: Say,
) -> Data:
    """The training batches, and those of the held-out split (none when there is no such split)."""
    cache = caches.cache_directory(config.run.data_cache_dir, "corpora")
    fraction = 0.0 if sources.held_out else config.eval.eval_fraction

    def corpus(paths: tuple[str, ...], granularity: GranularityConfig, questions: str) -> Any:
        line = ProgressLine("tokenising")

        def report_share(share: float) -> None:
            if jax.process_index() == 0:
                line.show(lambda: f"{share:.0%} of the corpus, {duration(line.elapsed)} so far", share)

        opened = open_corpus(
            paths,
            config.read,
            granularity,
            config.encoding,
            tokenizer,
            cache,
            questions,
            fraction,
            report_share,
            lambda text: say(f"corpus      {text}"),
        )
        line.clear()
        return opened

    train = corpus(sources.train, config.granularity, "train" if fraction else "all")
    for line in summary.corpus(train.report):
        say(f"train       {line}")
    if config.loss.redundancy:
        refuse_without_redundancy(train.report)
    rows = rules.row_multiple(mesh)
    loader = Loader(
        train,
        config.granularity,
        config.packing,
        config.encoding,
        config.run.seed,
        rows * config.optimizer.accumulation,
        second_targets(config.loss),
    )
    held_out: list[Batch] = []
    if fraction or sources.held_out:
        finest = dataclasses.replace(config.granularity, granularities=(str(train.granularities[0]),))
        split = corpus(sources.held_out or sources.train, finest, "held_out" if fraction else "all")
        most = config.eval.eval_max_trajectories
        held_out = evaluation_batches(
            split, config.packing, config.encoding, most, rows, redundancy=config.loss.redundancy
        )
    number = sum(batch.trajectories for batch in held_out)
    say(f"held out    {number:,} trajectories" if held_out else "held out    no question, so there is no evaluation")
    return Data(loader, held_out, train.report)


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


def open_candidates(path: str, sizes: tuple[str, ...]) -> list[Question]:
    """The candidates to choose from after training, read before it, so that a bad file costs no run.

    Raises:
      UserError: the file is no candidates file, a question has fewer candidates than the largest of sizes, or a
        candidate does not say whether it is correct.
    """
    questions = list(read_candidates([path]))
    largest = max(parse_sizes(sizes, "--bon_n"))
    for question in questions:
        if len(question.candidates) < largest:
            raise UserError(
                f"{question.source}: {len(question.candidates)} candidates, but --bon_n wants to choose among {largest}"
            )
        for number, candidate in enumerate(question.candidates):
            if candidate.correct is None:
                raise UserError(
                    f'{question.source}: candidate {number} has no "correct"; score the candidates after training, and '
                    "let bon grade them"
                )
    return questions
