"""What a linear reward head learns from frozen layers if each label counts once, and if repeated ones count as often.

    python bench/linear_probe.py --model=DIRECTORY --train_data=phase1_train.jsonl --heldout_data=phase1_test.jsonl \
      --frozen_layers=20 --cache_frozen=DIRECTORY --train_records=300 --record_tokens=600 --output=linear_probe.json

Logistic regression with an L2 penalty on the standardised hidden states of steps: at their markers, or (--state_of) at
the token before, or the mean over their tokens. It is fitted to its optimum, so that neither batches nor learning rates
play a part. Three weights of a distinct labelled step of the training records:

- once: 1;
- expanded: the number of trajectories that contain it, as in the expanded corpus;
- rebalanced: as expanded, with wrong steps weighted by a factor that gives them the share that they have in "once". A
  control: what of the difference is the balance of classes.

The penalty of each is chosen by five-fold cross-validation over training records. AUROC over distinct held-out steps;
intervals and paired differences by a bootstrap over held-out records. Hidden states that the cache lacks are computed.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
from typing import NamedTuple

import numpy as np
import scipy.optimize
from common import write_json
from jaxtyping import Float, Int

from cfprm_jax import flags
from cfprm_jax.config import LARGEST_SEED
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.options import ExperimentConfig, base_options
from cfprm_jax.experiments.real_data import HELD_OUT, TRAIN, Record, choose
from cfprm_jax.inference import trunk
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.inference.trunk import CachedTrunk, TrunkComputation, unit_of
from cfprm_jax.options import option, whole_number
from cfprm_jax.run import inputs
from cfprm_jax.run.evaluation import auroc
from cfprm_jax.sharding import session

PENALTIES = (1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0, 30.0)
_FOLDS = 5
_FIRST_STEP_TOKENS = 30


@dataclasses.dataclass(frozen=True)
class ProbeConfig(ExperimentConfig):
    """A linear probe of frozen layers, by the flags of experiment --grid=real; the first of --seeds draws folds."""

    state_of: str = option(
        "marker",
        "Whose hidden states a step has: its marker, the last token before it, or the mean of all its tokens.",
        choices=("marker", "last", "mean"),
    )
    output: str = option("", "JSON file for the figures, besides standard output; empty is none.")


class Steps(NamedTuple):
    """Distinct labelled steps.

    Attributes:
      hidden: of each.
      right: whether the label, the mean of all occurrences, is above 0.5.
      occurrences: the number of trajectories that contain and label it.
      record: the record of each.
    """

    hidden: Float[np.ndarray, "steps width"]
    right: Int[np.ndarray, " steps"]
    occurrences: Int[np.ndarray, " steps"]
    record: Int[np.ndarray, " steps"]


class States:
    """Hidden states of solutions, from the cache of a trunk."""

    def __init__(self, config: ProbeConfig, opened: session.Session, directory: pathlib.Path) -> None:
        base = base_options(config)
        if not base.frozen.cached:
            raise UserError("--frozen_layers and --cache_frozen are required: the probe reads what the cache holds")
        sources = inputs.materialise(base, directory)
        base = inputs.adopt_prm_options(base, sources, print)
        network = inputs.open_network(base, sources, opened.mesh)
        vocabulary = network.config.backbone.vocab_size
        tokenizer = load_tokenizer(sources.model, base.encoding.marker, vocabulary)
        self.encoder = Encoder(tokenizer, base.encoding)
        cache = trunk.open_cache(base.frozen.cache_frozen, network.partition, sources.model, tokenizer)
        load = lambda: trunk.load_trunk(network.partition, sources.model, opened.mesh)  # noqa: E731
        self._trunk = CachedTrunk(TrunkComputation(network.partition, load, opened.mesh), cache)
        scored = LoadedPRM(dataclasses.replace(network.config, remat="none"), {}, tokenizer, base.encoding, {})
        self._state_of = config.state_of
        self._scorer = Scorer(scored, batch_rows=1, mesh=opened.mesh, trunk=self._trunk)

    def of(self, records: list[Record]) -> Steps:
        """The distinct labelled steps of records."""
        solutions = [one for record in records for one in record.trajectories]
        encoded = self.encoder.encode_many([(one.question, one.steps, one.labels) for one in solutions])
        plan = self._scorer.plan([(one.question, one.steps) for one in solutions])
        scored = {i for batch in plan.batches for i in batch.members}
        owner = np.repeat(np.arange(len(records)), [len(record.trajectories) for record in records])
        members = [[i for i in np.flatnonzero(owner == k).tolist() if i in scored] for k in range(len(records))]
        units = [unit_of(own, encoded) for own in members]
        self._trunk.fill(plan.batches, units)
        self._trunk.store()
        hidden, labels, record = [], [], []
        for number, unit in enumerate(units):
            found: dict[int, list[float]] = {}
            read: dict[int, Int[np.ndarray, " tokens"]] = {}
            for k, i in enumerate(unit.members):
                path, markers = unit.places.path(k), encoded[i].step_positions
                # A first step begins after the question, whose end is not known here: its tokens are the last few.
                begins = np.append(max(markers[0] - _FIRST_STEP_TOKENS, 0), markers[:-1] + 1)
                for begin, marker, label in zip(begins, markers, encoded[i].labels.tolist(), strict=True):
                    if np.isfinite(label):
                        found.setdefault(path[marker], []).append(label)
                        read[path[marker]] = path[self._tokens(begin, marker)]
            start = self._trunk.cache.begin(unit.key)
            hidden += [self._trunk.cache.take(start + read[place]).astype(np.float64).mean(0) for place in found]
            labels += found.values()
            record += [number] * len(found)
        means = np.array([np.mean(own) for own in labels])
        counts = np.array([len(own) for own in labels])
        return Steps(np.array(hidden), (means > 0.5).astype(int), counts, np.array(record))

    def _tokens(self, begin: int, marker: int) -> slice:
        return {
            "marker": slice(marker, marker + 1),
            "last": slice(marker - 1, marker),
            "mean": slice(begin, marker),
        }[self._state_of]


def fit(
    x: Float[np.ndarray, "steps width"], y: Int[np.ndarray, " steps"], weight: Float[np.ndarray, " steps"], l2: float
) -> Float[np.ndarray, " width+1"]:
    """Weights and, last, the bias that minimise the weighted mean of BCE + l2 / 2 * |weights|^2."""
    share = weight / weight.sum()

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        w, z = parameters[:-1], x @ parameters[:-1] + parameters[-1]
        residual = share * (np.exp(-np.logaddexp(0, -z)) - y)
        value = share @ (np.logaddexp(0, z) - y * z) + l2 / 2 * w @ w
        return value, np.append(x.T @ residual + l2 * w, residual.sum())

    start = np.zeros(x.shape[1] + 1)
    return scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x


def weights(steps: Steps) -> dict[str, Float[np.ndarray, " steps"]]:
    """The weight of each step by treatment."""
    expanded, right = steps.occurrences.astype(float), steps.right == 1
    factor = (1 - right.mean()) / right.mean() * expanded[right].sum() / expanded[~right].sum()
    return {
        "once": np.ones(len(right)),
        "expanded": expanded,
        "rebalanced": np.where(right, expanded, factor * expanded),
    }


def logits(
    train: Steps, test: Float[np.ndarray, "steps width"], weight: np.ndarray, l2: float
) -> Float[np.ndarray, " steps"]:
    """Of steps, by a probe fitted to others."""
    mean, spread = train.hidden.mean(0), train.hidden.std(0) + 1e-6
    found = fit((train.hidden - mean) / spread, train.right, weight, l2)
    return (test - mean) / spread @ found[:-1] + found[-1]


def chosen_penalty(train: Steps, weight: np.ndarray, seed: int) -> float:
    """The penalty of the highest AUROC of distinct steps, by cross-validation over records."""
    order = np.random.default_rng(seed).permutation(train.record.max() + 1)
    fold = (np.argsort(order) % _FOLDS)[train.record]
    scores = []
    for l2 in PENALTIES:
        z = np.empty(len(fold))
        for k in range(_FOLDS):
            kept = Steps(*(values[fold != k] for values in train))
            z[fold == k] = logits(kept, train.hidden[fold == k], weight[fold != k], l2)
        # Logits of two folds are of two probes, so each fold is ranked by itself.
        scores.append(np.mean([auroc(z[fold == k], train.right[fold == k] == 1) for k in range(_FOLDS)]))
    return PENALTIES[int(np.argmax(scores))]


def main(config: ProbeConfig) -> None:
    """Runs the bench."""
    if not config.seeds:
        raise UserError("--seeds is empty: expected a whole number, which draws folds")
    seed = whole_number(config.seeds[0], "--seeds", 0, LARGEST_SEED)
    with session.opened(config.device, print) as opened, tempfile.TemporaryDirectory() as directory:
        states, real = States(config, opened, pathlib.Path(directory)), config.real
        numbers = {TRAIN: (config.train_data, real.train_records, real.record_tokens)}
        numbers[HELD_OUT] = (real.heldout_data, real.heldout_records, real.heldout_record_tokens)
        sets = []
        for names, (paths, number, most) in numbers.items():
            picked = choose(paths, config.read, states.encoder, number, most, flags=names)
            print(f"{names.paths:<14}{picked.describe()}")
            steps = states.of(picked.records)
            wrong, occurrences = steps.right == 0, steps.occurrences
            print(
                f"{'':<14}{len(wrong):,} distinct labelled steps, {wrong.mean():.1%} of them wrong; "
                f"{occurrences.sum():,} in trajectories, {occurrences[wrong].sum() / occurrences.sum():.1%} wrong"
            )
            sets.append(steps)
    train, held_out = sets
    found, penalties = {}, {}
    for name, weight in weights(train).items():
        penalties[name] = chosen_penalty(train, weight, seed)
        found[name] = logits(train, held_out.hidden, weight, penalties[name])
    own = [np.flatnonzero(held_out.record == number) for number in range(held_out.record.max() + 1)]
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(real.resamples):
        steps = np.concatenate([own[number] for number in rng.integers(len(own), size=len(own))])
        for name, z in found.items():
            draws[name].append(auroc(z[steps], held_out.right[steps] == 1))
    figures = {}
    pairs = [(name, None) for name in found] + [("once", "expanded"), ("once", "rebalanced")]
    for name, other in pairs:
        values = np.array(draws[name]) - (0 if other is None else np.array(draws[other]))
        mean = auroc(found[name], held_out.right == 1)
        if other is not None:
            mean -= auroc(found[other], held_out.right == 1)
        low, high = np.nanpercentile(values, [2.5, 97.5])
        title = name if other is None else f"{name} - {other}"
        note = f", penalty {penalties[name]:g}" if other is None else ""
        print(f"{title:<20}AUROC {100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]{note}")
        figures[title] = {"auroc": mean, "ci95": [low, high]}
    steps = {"train": len(train.right), "held_out": len(held_out.right)}
    write_json(config.output, "jax", "numpy", "scipy", steps=steps, penalties=penalties, figures=figures)


if __name__ == "__main__":
    sys.exit(flags.run(ProbeConfig, main))
