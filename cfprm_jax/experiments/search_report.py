"""What an experiment with --grid=search writes: accuracy at equal cost, as a table, a plot and JSON.

The cost of a setting is the mean number of tokens a question that policy and reward model process. It is compared with
Best-of-N at the same cost: between the two n whose costs enclose it, what each question gets right is interpolated
linearly in the logarithm of the cost. Differences are paired by seed and question.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from cfprm_jax.experiments import table2
from cfprm_jax.experiments.grid import LOSSES
from cfprm_jax.experiments.intervals import Estimate, estimates
from cfprm_jax.experiments.oracle import TREATMENTS
from cfprm_jax.experiments.search_runner import SearchResult
from cfprm_jax.runtime import atomic

FILES = ("search.md", "search.png", "search.json")
BASELINE = "best_of_n"
_COLOURS = {"best_of_n": "#2f6db5", "beam": "#b03a2e", "dvts": "#2a7f3f", "greedy": "#8a8a8a"}

Table = Float[np.ndarray, "seeds questions"]


@dataclasses.dataclass(frozen=True)
class SettingOutcome:
    """One setting with the reward models of one treatment, on one test set.

    Attributes:
      policy, reward: tokens a question.
      difference: accuracy minus that of Best-of-N at the same cost; None for Best-of-N, and outside of its costs.
    """

    level: str
    row: str
    treatment: str
    test: str
    setting: str
    policy: float
    reward: float
    accuracy: Estimate
    difference: Estimate | None

    @property
    def cost(self) -> float:
        """Tokens a question of both."""
        return self.policy + self.reward


def write(directory: pathlib.Path, done: Sequence[SearchResult], config: dict[str, Any]) -> str:
    """Write FILES into the directory of the experiment; returns the table."""
    found = outcomes(done)
    text = table(found, len({result.cell.seed for result in done}))
    atomic.write_text(directory / "search.md", text)
    content = {"config": config, "settings": [dataclasses.asdict(one) for one in found]}
    atomic.write_json(directory / "search.json", content, indent=1)
    plot(found, directory / "search.png")
    return text


def outcomes(done: Sequence[SearchResult]) -> list[SettingOutcome]:
    """Every setting, of the seeds that have all treatments."""
    groups: dict[tuple[str, str, str], list[SearchResult]] = {}
    for result in done:
        cell = result.cell
        groups.setdefault((cell.level, cell.row, cell.treatment), []).append(result)
    out = []
    for (level, row, treatment), results in groups.items():
        names = [name.split("/", 1)[1] for name in results[0].arrays if name.startswith("right/")]
        stacked = {
            name: {
                kind: np.stack([r.arrays[f"{kind}/{name}"] for r in results]) for kind in ("right", "policy", "reward")
            }
            for name in names
        }
        for name, one in stacked.items():
            test, setting = name.split("/")
            baseline = [
                (float((other["policy"] + other["reward"]).mean()), other["right"])
                for key, other in stacked.items()
                if key.startswith(f"{test}/{BASELINE}.")
            ]
            cost = float((one["policy"] + one["reward"]).mean())
            same = None if setting.startswith(BASELINE) else at_cost(baseline, cost)
            out.append(
                SettingOutcome(
                    level=level,
                    row=row,
                    treatment=treatment,
                    test=test,
                    setting=setting,
                    policy=float(one["policy"].mean()),
                    reward=float(one["reward"].mean()),
                    accuracy=estimates([one["right"]])[0],
                    difference=None if same is None else estimates([one["right"] - same])[0],
                )
            )
    return out


def at_cost(points: Sequence[tuple[float, Table]], cost: float) -> Table | None:
    """What is right at a cost, interpolated in its logarithm; None outside of the points' costs."""
    ordered = sorted(points, key=lambda point: point[0])
    for (low, before), (high, after) in itertools.pairwise(ordered):
        if low <= cost <= high:
            share = 0.0 if high == low else (math.log(cost) - math.log(low)) / (math.log(high) - math.log(low))
            return (1 - share) * before + share * after
    return None


def table(found: Sequence[SettingOutcome], seeds: int) -> str:
    """All settings, in Markdown."""
    head = ["level", "loss", "reward model", "test set", "setting", "tokens, policy", "tokens, reward", "accuracy"]
    grid = [[*head, "minus Best-of-N at equal cost"]]
    for one in found:
        difference = "" if one.difference is None else one.difference.percent("+")
        names = [one.level, LOSSES[one.row], TREATMENTS[one.treatment].title, one.test, one.setting]
        grid.append([*names, f"{one.policy:,.0f}", f"{one.reward:,.0f}", one.accuracy.percent(), difference])
    return "\n".join(
        [
            "# Search at equal cost",
            "",
            f"Accuracy of the first solution in %, {seeds} seed{'' if seeds == 1 else 's'}, with 95 % intervals; "
            "tokens that each network processes for a question. n is the number of solutions in parallel, g the steps "
            "between two evaluations of the reward model. The last column compares with Best-of-N for as many tokens "
            "of both networks, interpolated between its n; it is empty beyond their costs.",
            "",
            table2.padded(grid),
        ]
    )


def plot(found: Sequence[SettingOutcome], path: pathlib.Path) -> None:
    """Accuracy over cost, a panel for each reward model and test set."""
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((one.level, one.row, one.treatment) for one in found))
    tests = list(dict.fromkeys(one.test for one in found))
    figure = Figure(figsize=(4.6 * len(tests), 3.4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(tests), squeeze=False, sharex=True)
    for row, line in zip(rows, axes, strict=True):
        for test, panel in zip(tests, line, strict=True):
            curves: dict[str, list[SettingOutcome]] = {}
            for one in found:
                if (one.level, one.row, one.treatment) == row and one.test == test:
                    method, _, *rest = one.setting.split(".")
                    curves.setdefault(".".join([method, *rest]), []).append(one)
            for name, curve in curves.items():
                curve.sort(key=lambda one: one.cost)
                style = {"g2": "--", "g4": ":"}.get(name.rpartition(".")[2], "-")
                panel.plot(
                    [one.cost for one in curve],
                    [100 * one.accuracy.mean for one in curve],
                    marker="o",
                    linestyle=style,
                    color=_COLOURS[name.split(".")[0]],
                    label=name,
                )
            panel.set_xscale("log")
            panel.set_title(f"{row[0]}, {LOSSES[row[1]]}, {TREATMENTS[row[2]].title}: {test}", fontsize=8)
            panel.set_xlabel("tokens a question, policy and reward model")
            panel.set_ylabel("accuracy, %")
    axes[0][0].legend(fontsize=6)
    # Neither date nor version in the file: the same results give the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})
