"""What a run of an experiment trains on."""

from __future__ import annotations

import dataclasses

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
