"""Options of training: optimizer, loss, evaluation."""

from __future__ import annotations

import dataclasses

from cfprm_jax.config.shared import LABEL_WEIGHTS, LOSSES, MOST_COUNT
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options):
    """Optimizer: AdamW with linear warm-up and decay."""

    optimizer: str = option(
        "adamw",
        "adamw keeps float32 master weights and moments: 16 bytes per parameter, gradients included. adamw_compact "
        "keeps exact float32 master weights and 8-bit moments: 8 bytes; fits a 7B fine-tune on one 80 GB GPU.",
        choices=("adamw", "adamw_compact"),
    )
    learning_rate: float = option(2e-6, "Peak learning rate.", lower=0.0, upper=1.0)
    warmup_fraction: float = option(
        0.03, "Fraction of the optimizer steps with linear warm-up from 0.", lower=0.0, upper=1.0
    )
    decay: str = option("cosine", "Learning rate schedule after the warm-up.", choices=("cosine", "linear", "constant"))
    final_rate_fraction: float = option(
        0.0, "Final learning rate at the end of the decay, as a fraction of the peak.", lower=0.0, upper=1.0
    )
    adam_b1: float = option(0.9, "AdamW's beta 1.", lower=0.0, upper=0.99999)
    adam_b2: float = option(0.999, "AdamW's beta 2.", lower=0.0, upper=0.99999)
    adam_eps: float = option(1e-8, "AdamW's epsilon.", lower=1e-30, upper=1.0)
    weight_decay: float = option(
        0.0, "Decoupled weight decay of matrices; biases, norms and embeddings have none.", lower=0.0, upper=1000.0
    )
    max_grad_norm: float = option(
        1.0, "Gradient clipping: maximum global norm; 0 is off.", lower=1e-6, upper=1e6, also=0.0
    )
    accumulation: int = option(
        1, "Gradient accumulation: microbatches per optimizer step. More of them need less memory.", lower=1, upper=1024
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate * self.weight_decay > 1:
            raise UserError(
                f"--learning_rate={self.learning_rate:g} times --weight_decay={self.weight_decay:g} is above 1: "
                "a single step would change the sign of the weights"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig(Options):
    """Loss."""

    loss: str = option("q_ranking", "Training loss.", choices=LOSSES)
    margin: float = option(4.0, "Margin of Q-ranking (zeta in PQM).", lower=0.0, upper=1000.0)
    label_weight: str = option(
        "trajectory",
        "Unit that has weight one in the loss. trajectory: every label of every trajectory. node: each distinct step "
        "of a batch (same question, previous steps and text), with the mean of its labels. question, for q_ranking "
        "only: each question, as the mean over its trajectories.",
        choices=LABEL_WEIGHTS,
    )
    ranking_negatives: str = option(
        "path",
        "Negative steps that a positive step is ranked against, with --loss=q_ranking --label_weight=node. path: "
        "those whose previous step is on the path to it. question: all of its question.",
        choices=("path", "question"),
    )
    negative_weight: float = option(
        1.0,
        "Class weight, for bce and mse, of steps labelled 0.5 or less. Applies to the sum and to the normaliser.",
        lower=0.0,
        upper=1000.0,
    )
    redundancy_weight: float = option(
        0.0,
        "Weight of the redundancy loss; 0 is off. Adds a second output to the reward head, trained by binary "
        "cross-entropy to detect steps that are correct but redundant: PRM800K's rating 0 against 1. Steps rated -1 "
        "have no target.",
        lower=0.0,
        upper=100.0,
    )

    @property
    def redundancy(self) -> bool:
        """Whether the reward head has a redundancy output."""
        return self.redundancy_weight > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "q_ranking" and self.negative_weight != 1:
            raise UserError(f"--negative_weight={self.negative_weight:g} is for --loss=bce and mse, not q_ranking")
        if self.loss != "q_ranking" and self.label_weight == "question":
            raise UserError(
                f"--label_weight=question is for --loss=q_ranking, not {self.loss}; choose trajectory or node"
            )


@dataclasses.dataclass(frozen=True)
class EvalConfig(Options):
    """Evaluation."""

    eval_data: tuple[str, ...] = option(
        (),
        "Held-out corpora; overrides --eval_fraction, as --train_data=synthetic does, which has its own.",
        kind="list",
    )
    eval_fraction: float = option(
        0.02,
        "Fraction of the questions held out of training, selected by a hash of their text.",
        lower=0.0,
        upper=0.5,
    )
    eval_max_trajectories: int = option(
        512, "Maximum number of held-out trajectories per evaluation; 0 is all.", lower=0, upper=MOST_COUNT
    )
    bon_n: tuple[str, ...] = option(
        ("auto",),
        "Values of n of the Best-of-N evaluation of --bon_candidates. auto: those of 8, 16, 32 and 64 that every "
        "question has.",
        kind="list",
    )
    bon_candidates: str = option(
        "",
        "Candidates file for a Best-of-N evaluation at the end of training; synthetic is that of the generated data.",
    )
