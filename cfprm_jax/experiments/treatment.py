"""What a run of an experiment trains on, and for how many steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from cfprm_jax.config import GranularityConfig
from cfprm_jax.data.batching import BatchPlan, stages
from cfprm_jax.data.corpus import Corpus
from cfprm_jax.errors import UserError
from cfprm_jax.run.options import TrainConfig

MOST_PASSES: int = GranularityConfig.__dataclass_fields__["epochs_per_granularity"].metadata["upper"]
"""Of a run."""

FIRST_TITLES: dict[str, str] = {}
"""Titles that were reworded, to what they were when results were first stored."""

ALL, MATCHED, COMPUTE, EXACT = "all", "matched", "compute", "exact"


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What a run trains on.

    Attributes:
      title: in tables and text.
      granularities: window sizes in the order of training.
      passes: passes at each granularity, in passes of plain training.
      schedule: as --schedule.
      packing: as --packing; empty is the packing of the experiment.
      record_chunk: as --record_chunk, of the packing or of what steps are compared with.
      steps: "all" of the data; "matched", the full batches that solutions at C=2 and at 1 make together, about twice
        the steps of "plain";
        "compute", as many as have the tokens that tree packing computes for all of the data; or "exact", the steps of
        the passes over the training set with exact labels.
      label_weight: as --label_weight; empty is that of the experiment.
      negative_weight: as --negative_weight; 0 gives negatives the share that they have of the distinct steps.
      batch_tokens: as --batch_tokens; 0 is the batch size of the experiment.
      train_tokens: tokens that the run computes, in passes as needed; 0 is what the passes have.
      learning_rate: as --learning_rate; 0 is that of the experiment.
      training_rows: of :data:`.oracle.KINDS` or :data:`.rolled.FILES`, the laboratory's training set with further
        fields; empty where none is needed.
      estimate: as --estimate; empty is that of the experiment.
    """

    title: str
    granularities: tuple[str, ...]
    passes: int = 1
    schedule: str = "coarse_to_fine"
    packing: str = ""
    record_chunk: int = 0
    steps: str = ALL
    label_weight: str = ""
    negative_weight: float = 1.0
    batch_tokens: int = 0
    train_tokens: int = 0
    learning_rate: float = 0.0
    training_rows: str = ""
    estimate: str = ""

    def identity(self) -> dict[str, Any]:
        """What results are known by: every field, with the first title, so that rewording it repeats no run."""
        return {**dataclasses.asdict(self), "title": FIRST_TITLES.get(self.title, self.title)}


def num_steps(config: TrainConfig, corpus: Corpus) -> int:
    """Steps of all passes of a run: those of its loader, without fitting row shapes, which takes a second."""
    packing = config.packing
    return BatchPlan(
        corpus,
        config.granularity,
        packing.packing,
        packing.batch_size,
        seed=config.run.seed,
        record_chunk=packing.record_chunk,
        batch_tokens=packing.batch_tokens,
    ).num_steps


def lasting(config: TrainConfig, steps: int, corpus: Corpus, *, asked: str, tokens: float = 0.0) -> TrainConfig:
    """The options of a run of so many steps, in further passes over its corpus where its own have fewer.

    Passes at several granularities follow one another: further ones would leave none for the last. Such a run keeps its
    passes and has as many steps as they have at most.

    Args:
      asked: the flag that asks for the steps, with its value, for the error.
      tokens: of a step, where the flag is in tokens.

    Raises:
      UserError: more passes than a run may have.
    """
    own, passes = num_steps(config, corpus), config.granularity.epochs_per_granularity
    if len(stages(config.granularity)) > 1:
        steps = min(steps, own)
    needed = max(passes, -(-steps * passes // own))
    while True:
        if needed > MOST_PASSES:
            most = own * MOST_PASSES // passes
            most -= most % 10 ** max(len(str(most)) - 2, 0)
            possible = f"{most * tokens:,.0f} tokens" if tokens else f"{most:,} steps"
            raise UserError(
                f"{asked} is {steps:,} steps, {needed:,} passes over the training data; a run has at most "
                f"{MOST_PASSES:,} passes, here about {possible}. Lower it, or train on more data"
            )
        granularity = dataclasses.replace(config.granularity, epochs_per_granularity=needed)
        run = dataclasses.replace(config.run, max_steps=steps)
        longer = dataclasses.replace(config, granularity=granularity, run=run)
        # With --batch_tokens a pass may have a step less than another, as its order is another.
        if needed == passes or num_steps(longer, corpus) >= steps:
            return longer
        needed += 1
