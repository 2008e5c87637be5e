"""The training of a checkpoint as its run directory records it: options, data, metrics, Best-of-N."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cfprm_jax.checkpoints import saving
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.report import results, tables
from cfprm_jax.run import directory, metrics, summary
from cfprm_jax.run.options import SYNTHETIC

# Of a run of train: where its Best-of-N results are, if it was given candidates.
_BEST_OF_N = pathlib.Path("best_of_n") / "results.json"
# A corpus may have a million malformed rows, which corpus.json lists.
_MOST_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Training:
    """One checkpoint of a run directory; what the directory lacks is empty.

    Attributes:
      step: of the checkpoint.
      options: the resolved flags of train.
      data: report of the training corpus.
      num_steps: length of the whole run; 0 if unknown.
      trained: granularity -> number of trajectories of the steps up to the checkpoint.
      held_out: name -> value of the metrics on the held-out split, the last ones up to the checkpoint.
      best_of_n: the object of results.json; only of the newest checkpoint, which is what it was made with.
    """

    step: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_steps: int = 0
    trained: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held_out: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    best_of_n: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def random_start(self) -> bool:
        """Whether the run began from random weights; the network of --model=synthetic has no others."""
        return self.options.get("init") == "random" or self.options.get("model") == SYNTHETIC


def read_training(path: str | pathlib.Path) -> Training:
    """The training of the checkpoint that path names: a run directory (its newest) or checkpoints/STEP in one.

    Raises:
      UserError: there is no checkpoint, or it, corpus.json or results.json is damaged.
    """
    run, step = saving.locate(path)
    meta = saving.read_meta(run, step)
    trained: dict[str, int] = {}
    held_out: dict[str, float | None] = {}
    for line in _metrics(run / directory.METRICS, step):
        if "trajectories" in line and "granularity" in line:
            granularity = str(line["granularity"])
            trained[granularity] = trained.get(granularity, 0) + line["trajectories"]
        held_out = {name: value for name, value in line.items() if name.startswith("eval_")} or held_out
    newest = step == saving.newest(run)
    return Training(
        step=step,
        options=meta.get("config", {}),
        data=_object(run / directory.CORPUS, corpus_lines),
        num_steps=meta.get("fingerprint", {}).get("steps of the run", 0),
        trained=trained,
        held_out=held_out,
        best_of_n=_object(run / _BEST_OF_N, best_of_n_table) if newest else {},
    )


def _object(path: pathlib.Path, shown: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """The JSON object of a file, which may not be there.

    Args:
      shown: makes of it what the card shows.

    Raises:
      UserError: it is damaged: no JSON object, or one that lacks what the card shows.
    """
    if not path.is_file():
        return {}
    found = read_object(path, _MOST_BYTES)
    try:
        shown(found)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: damaged, or written by another program: {type(error).__name__}: {error}; without the file the "
            "card leaves it out"
        ) from error
    return found


def corpus_lines(data: Mapping[str, Any]) -> list[str]:
    """What corpus.json says, as the lines of a list."""
    return [f"* {line}" for line in summary.corpus(dict(data))]


def best_of_n_table(outcome: Mapping[str, Any]) -> str:
    """The caption and the main table of a results.json."""
    return f"{results.caption(outcome)}\n\n{tables.markdown(tables.rows_table(outcome['rows']))}"


def _metrics(path: pathlib.Path, last: int) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl up to a step; those that are not whole are passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for text in file:
            line = metrics.read_line(text)
            if line is not None and line["step"] <= last:
                yield line


def hub_name(backbone: str, raw: Mapping[str, Any]) -> str:
    """ORGANISATION/NAME of a backbone on the Hugging Face hub if its directory or config.json names it, else "".

    Args:
      backbone: the directory that training started from.
      raw: its config.json.
    """
    for part in pathlib.Path(backbone).parts:  # of the hub's cache
        if found := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", part):
            return f"{found[1]}/{found[2]}"
    name = str(raw.get("_name_or_path", ""))
    # Any other ORGANISATION/NAME may be a path of the machine on which it was saved.
    return name if re.fullmatch(r"Qwen/[\w.-]+", name) else ""


def base_model(training: Training, raw: Mapping[str, Any]) -> str:
    """The :func:`hub_name` of the backbone that training started from; "" for random weights, which are of no model."""
    return "" if training.random_start else hub_name(training.options.get("model", ""), raw)
