"""What an experiment with --grid=search writes: accuracy at equal cost, as a table, a plot and JSON.

The cost of a setting is the mean number of tokens a question that policy and reward model process. It is compared with
Best-of-N at the same cost: between the two n whose costs enclose it, what each question gets right is interpolated
linearly in the logarithm of the cost. Differences are paired by seed and question. Summaries average them over n and
the test sets, whose questions are different ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


@dataclasses.dataclass(frozen=True)
class MeanDifference:
    """A difference averaged over the n of a method and the test sets.

    Attributes:
      reward_model: title of what differs, or of what the method was compared with Best-of-N with.
      settings: pairs of n and test set that it is the mean of.
    """

    level: str
    row: str
    reward_model: str
    method: str
    settings: int
    difference: Estimate


class _Setting(NamedTuple):
    """The outcomes of a setting on a test set, and minus Best-of-N's at the same cost, where that is known."""

    test: str
    name: str
    policy: float
    reward: float
    right: Table
    difference: Table | None

    @property
    def method(self) -> str:
        """The setting without its n: "beam, g=2"."""
        method, _, *rest = self.name.split(".")
        return ", ".join([method, *(f"g={one[1:]}" for one in rest)])


_Group = tuple[str, str, str]  # level, row, treatment


def write(directory: pathlib.Path, done: Sequence[SearchResult], config: dict[str, Any]) -> str:
    """Write FILES into the directory of the experiment; returns the tables."""
    found = settings(done)
    every, against, between = outcomes(found), against_best_of_n(found), between_reward_models(found)
    parts = [table(every, len(_seeds(done))), summary_table(against, "Search minus Best-of-N at equal cost")]
    if between:
        parts.append(summary_table(between, "One reward model minus another in the same search"))
    text = "\n".join(parts)
    atomic.write_text(directory / "search.md", text)
    content = {
        "config": config,
        "settings": [dataclasses.asdict(one) for one in every],
        "against_best_of_n": [dataclasses.asdict(one) for one in against],
        "between_reward_models": [dataclasses.asdict(one) for one in between],
    }
    atomic.write_json(directory / "search.json", content, indent=1)
    plot(every, directory / "search.png")
    return text


def _seeds(done: Sequence[SearchResult]) -> list[int]:
    """The seeds of which every cell is there."""
    groups: dict[_Group, set[int]] = {}
    for result in done:
        groups.setdefault(_group(result), set()).add(result.cell.seed)
    common = set.intersection(*groups.values())
    # While the first seed is computed, each group may have its own.
    return sorted(common or set.union(*groups.values()))


def _group(result: SearchResult) -> _Group:
    cell = result.cell
    return cell.level, cell.row, cell.treatment


def settings(done: Sequence[SearchResult]) -> dict[_Group, list[_Setting]]:
    """Every setting with the reward models of each group, of the seeds that have all of them."""
    seeds = _seeds(done)
    groups: dict[_Group, list[SearchResult]] = {}
    for result in sorted(done, key=lambda result: result.cell.seed):
        if result.cell.seed in seeds:
            groups.setdefault(_group(result), []).append(result)
    out: dict[_Group, list[_Setting]] = {}
    for group, results in groups.items():
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
            policy, reward = float(one["policy"].mean()), float(one["reward"].mean())
            same = None if setting.startswith(BASELINE) else at_cost(baseline, policy + reward)
            difference = None if same is None else one["right"] - same
            out.setdefault(group, []).append(_Setting(test, setting, policy, reward, one["right"], difference))
    return out


def outcomes(found: Mapping[_Group, Sequence[_Setting]]) -> list[SettingOutcome]:
    """What the table and the plot have of every setting."""
    return [_outcome(group, one) for group, own in found.items() for one in own]


def _outcome(group: _Group, one: _Setting) -> SettingOutcome:
    level, row, treatment = group
    return SettingOutcome(
        level=level,
        row=row,
        treatment=treatment,
        test=one.test,
        setting=one.name,
        policy=one.policy,
        reward=one.reward,
        accuracy=estimates([one.right])[0],
        difference=None if one.difference is None else estimates([one.difference])[0],
    )


def against_best_of_n(found: Mapping[_Group, Sequence[_Setting]]) -> list[MeanDifference]:
    """Of each reward model and method, accuracy minus Best-of-N's at equal cost."""
    out = []
    for (level, row, treatment), settings in found.items():
        tables = [(one.method, one.test, one.difference) for one in settings if one.difference is not None]
        out += _summaries(level, row, TREATMENTS[treatment].title, tables)
    return out


def between_reward_models(found: Mapping[_Group, Sequence[_Setting]]) -> list[MeanDifference]:
    """Of each method, the accuracy with one reward model minus that with the first of the same level and loss."""
    out = []
    for (level, row, treatment), settings in found.items():
        first = next(group for group in found if group[:2] == (level, row))
        if treatment == first[2]:
            continue
        others = {(one.test, one.name): one.right for one in found[first]}
        tables = [(one.method, one.test, one.right - others[one.test, one.name]) for one in settings]
        title = f"{TREATMENTS[treatment].title} - {TREATMENTS[first[2]].title}"
        out += _summaries(level, row, title, tables)
    return out


def _summaries(level: str, row: str, title: str, tables: Sequence[tuple[str, str, Table]]) -> list[MeanDifference]:
    out = []
    for method in dict.fromkeys(method for method, _, _ in tables):
        of_tests: dict[str, list[Table]] = {}
        for name, test, values in tables:
            if name == method:
                of_tests.setdefault(test, []).append(values)
        every = np.concatenate([np.mean(values, axis=0) for values in of_tests.values()], axis=1)
        number = sum(map(len, of_tests.values()))
        out.append(MeanDifference(level, row, title, method, number, estimates([every])[0]))
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


def summary_table(found: Sequence[MeanDifference], title: str) -> str:
    """Averaged differences, in Markdown."""
    grid = [["level", "loss", "reward model", "method", "settings", "difference"]]
    for one in found:
        names = [one.level, LOSSES[one.row], one.reward_model, one.method]
        grid.append([*names, str(one.settings), one.difference.percent("+")])
    return f"## {title}\n\nMeans over n and test sets, in points.\n\n{table2.padded(grid)}"


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
