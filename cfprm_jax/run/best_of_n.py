"""Best-of-N at the end of a run: the trained PRM ranks --bon_candidates."""

from __future__ import annotations

import pathlib

import jax
from jax.sharding import Mesh

from cfprm_jax.checkpoints import retention
from cfprm_jax.data.candidates import Question
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.inference import load, trunk
from cfprm_jax.inference.rows import scored_questions
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.report import best_of_n as report
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import config_files

DIRECTORY = "best_of_n"


def score(
    config: TrainConfig, questions: list[Question], output_dir: pathlib.Path, step: int, mesh: Mesh
) -> list[Question]:
    """The candidates with the scores of a checkpoint, as score gives them; in all processes of a run.

    The frozen layers' output comes from the run's cache if it has one, unless there are several processes: they would
    have to agree on what is missing.
    """
    checkpoint = output_dir / retention.CHECKPOINTS / str(step)  # this one or none: not an older one
    loaded = load.open_prm(checkpoint, config.model.dtype, config.model.attention, mesh)
    cached, same = None, config.model.deterministic
    if config.frozen.cached and jax.process_count() == 1:
        cached = trunk.for_scoring(config.frozen.cache_frozen, loaded, checkpoint, mesh, deterministic=same)
    return list(scored_questions(questions, Scorer(loaded, mesh=mesh, trunk=cached, deterministic=same)))


def write(config: TrainConfig, scored: list[Question], output_dir: pathlib.Path) -> str:
    """Evaluate as bon does, and write results and report into OUTPUT_DIR/best_of_n; the text to print."""
    directory = output_dir / DIRECTORY
    choice = BonConfig(
        input=(config.eval.bon_candidates,), n=config.eval.bon_n, grader="none", output_dir=str(directory)
    )
    result = report.evaluate(scored, choice)
    config_files.write_config(choice, directory)
    report.write(result, directory)
    return f"\n{result.summary}\nreport      {directory / 'report.html'}"
