"""Checkpoints of a run: saved in the background, restored onto any mesh, compared before they are trusted.

A checkpoint holds three items: `state` (parameters, optimizer state, step), `data` (the position in the data as JSON,
the same on every process, so that their number may change), and `meta` (fingerprint, configuration, metrics, checksums
of the state); both JSON items have a checksum of their own. Orbax writes all under a temporary name and renames it when
it is on disk: a run that dies during a save leaves the checkpoint before it as the newest.

Orbax's CheckpointManager is not used: with several processes it waits for all of them when one has failed to
write or to read. Its checkpointer and handlers, which do the work, are used here alone.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from cfprm_jax.checkpoints import checksums, orbax_files, restoring, retention
from cfprm_jax.checkpoints.restoring import Restored
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.config.shared import EVAL_METRICS
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import digests, disk
from cfprm_jax.runtime.distributed import Processes

# A save may take that long before it counts as failed. Orbax's 20 minutes are little for 70B on a network file system.
_SAVE_SECONDS = 4 * 3600
# In meta: digest of what its metrics were computed on.
_HELD_OUT = "held_out"


class Checkpoints:
    """The checkpoints of one run directory. Close it to wait for the last save.

    All processes of a run call the same methods in the same order; the first alone renames and deletes.
    """

    def __init__(
        self,
        output_dir: str | pathlib.Path,
        keep: int,
        keep_best: str = "none",
        processes: Processes | None = None,
        held_out: str | None = None,
    ) -> None:
        """Makes the folder, and clears what a process that died during a save has left there.

        Args:
          keep: number of newest checkpoints that are kept.
          keep_best: one of retention.HIGHER_IS_BETTER, or "none"; the best checkpoint by it is kept too, as run/best.
          held_out: digest of what evaluations are made on; metrics on something else are not compared with them.
        """
        self.directory = pathlib.Path(output_dir).resolve() / CHECKPOINTS
        self._keep, self._metric = keep, None if keep_best == "none" else keep_best
        self._processes = processes or Processes()
        self._held_out = held_out
        self._best: tuple[float, int | None] = (-math.inf, None)  # value, step
        self._pending: tuple[int, int] | None = None  # step that is being saved, bytes of its state
        orbax_files.quiet_orbax()
        if self._processes.first:
            self.directory.mkdir(parents=True, exist_ok=True)
            retention.clear_unfinished(self.directory)
        self._processes.barrier()
        handler = ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(),
            data=ocp.JsonCheckpointHandler(orbax_files.JSON_FILE),
            meta=ocp.JsonCheckpointHandler(orbax_files.JSON_FILE),
        )
        # Directories made in the background would leave the writers waiting for one that could not be made.
        options = ocp.options.AsyncOptions(timeout_secs=_SAVE_SECONDS, create_directories_asynchronously=False)
        self._saver = ocp.AsyncCheckpointer(handler, async_options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(retention.complete(self.directory), default=None)

    def improves(self, evaluation: Mapping[str, Any] | None) -> bool:
        """Whether the state with this evaluation would be the best so far, by keep_best."""
        return self._metric is not None and retention.value(self._metric, evaluation) > self._best[0]

    def save(self, step: int, state: Any, data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Begin to save. The arrays are copied before this returns, so the state may be donated to the next step.

        Args:
          meta: its "metrics", if any, are those of an evaluation of this very state; add_evaluation brings them later.
        """
        self.wait()
        meta = {**meta, **self._evaluated_on(), **checksums.recorded(state)}
        self._pending = step, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with self._writing():
            self._saver.save(
                self.directory / str(step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(digests.sealed(data)),
                    meta=ocp.args.JsonSave(digests.sealed(meta)),
                ),
            )
        self._note_best(step, meta.get("metrics"))

    def add_evaluation(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """The evaluation of a checkpoint that was saved without one, which may be the best, then, too."""
        folder = self.directory / str(step)
        if self._processes.first:
            try:
                meta = read_meta(self.directory.parent, step)
                orbax_files.replace_json(folder, "meta", {**meta, **self._evaluated_on(), "metrics": evaluation})
            except OSError as error:
                raise UserError(
                    f"cannot write the evaluation into checkpoint {folder}: {disk.reason(error)}"
                ) from error
        self._note_best(step, evaluation)
        self._point_to_best()

    def _evaluated_on(self) -> dict[str, str]:
        return {} if self._held_out is None else {_HELD_OUT: self._held_out}

    def _note_best(self, step: int, evaluation: Mapping[str, Any] | None) -> None:
        if self.improves(evaluation):
            self._best = retention.value(str(self._metric), evaluation), step

    def _point_to_best(self) -> None:
        if not self._processes.first or self._metric is None:
            return
        if self._best[1] is None:
            retention.remove_best(self.directory.parent)
        else:
            retention.point_to_best(self.directory.parent, self.directory / str(self._best[1]))

    def check(self) -> None:
        """Without waiting: UserError if the save in the background has failed; the older ones go if it is done."""
        if self._pending is not None:
            with self._writing():
                self._saver.check_for_errors()
            if (self.directory / str(self._pending[0])).exists():
                self.wait()

    def wait(self) -> None:
        """Until everything that was to be saved is on disk."""
        if self._pending is None:
            return
        with self._writing():
            self._saver.wait_until_finished()
        self._pending = None
        self._point_to_best()
        if self._processes.first:
            steps = retention.complete(self.directory)
            retention.remove(self.directory, [step for step in steps[: -self._keep] if step != self._best[1]])

    def restore_newest(
        self,
        abstract_state: Any,
        accept: Callable[[dict[str, Any]], None] = lambda meta: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> Restored:
        """The newest checkpoint that is whole, as :func:`cfprm_jax.checkpoints.restoring.newest` finds it."""
        restored = restoring.newest(self.directory, abstract_state, self._processes, accept, log)
        self._find_best(log)
        # A run that was killed, or whose best checkpoint is damaged, has a link to another one or to none.
        self._point_to_best()
        return restored

    def _find_best(self, log: Callable[[str], None]) -> None:
        if self._metric is None:
            return
        metric, metrics, others = self._metric, dict[int, Mapping[str, Any] | None](), list[str]()
        for step in self._processes.share(lambda: retention.complete(self.directory)):
            with contextlib.suppress(UserError):
                meta = read_meta(self.directory.parent, step)
                # Checkpoints of earlier versions do not say what they were evaluated on.
                if self._held_out is None or meta.get(_HELD_OUT, self._held_out) == self._held_out:
                    metrics[step] = meta.get("metrics")
                elif meta.get("metrics") is not None:
                    others.append(str(step))
        if others:
            log(
                f"resume      checkpoints {', '.join(others)} were evaluated on other held-out trajectories, so "
                f"--keep_best={metric} leaves them out"
            )
        best = self._processes.share(lambda: retention.best(metrics, metrics.get, metric))
        self._best = (-math.inf, None) if best is None else (retention.value(metric, metrics.get(best)), best)

    def close(self) -> None:
        """Wait for the last save and let go of the directory."""
        try:
            self.wait()
        finally:
            self._saver.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A save that fails as one UserError, with nothing of it left on the disk."""
        try:
            yield
        except (OSError, ValueError, KeyError, jax.errors.JaxRuntimeError) as error:
            step, size = self._pending or (0, 0)
            self._pending = None
            free, why = disk.free(self.directory), disk.reason(error)
            if self._processes.first:
                retention.clear_failed(self.directory, step)
            good = f"the last good one is {self.directory / str(self.latest)}" if self.latest else "there is none yet"
            raise UserError(
                f"cannot write checkpoint {self.directory / str(step)}: {why} (it has {disk.size(size)} before "
                f"compression, and {free} were free); {good}; --resume=auto resumes from it"
            ) from error


def newest(output_dir: pathlib.Path) -> int | None:
    """Step of the newest complete checkpoint of a run directory, which may not exist; nothing is created."""
    return max(retention.complete(output_dir / CHECKPOINTS), default=None)


def is_run(path: str | pathlib.Path) -> bool:
    """Whether a path is a run directory of train, its folder of checkpoints, or one of these, including RUN/best.

    Another directory in a folder that happens to be called so, such as an export, is none.
    """
    path = pathlib.Path(path).resolve()
    return _is_checkpoint(path) or path.name == CHECKPOINTS or (path / CHECKPOINTS).is_dir()


def locate(path: str | pathlib.Path) -> tuple[pathlib.Path, int]:
    """(run directory, step) of a run directory (its newest checkpoint) or of one of its checkpoints/STEP.

    Raises:
      UserError: there is no checkpoint.
    """
    run, steps = candidates(path)
    return run, steps[0]


def candidates(path: str | pathlib.Path) -> tuple[pathlib.Path, list[int]]:
    """(run directory, steps) of the checkpoints that a path stands for: one that is named, or all, the newest first."""
    require_prm_directory(
        path, f"{path} is neither a run directory of train with a checkpoint nor one of its {CHECKPOINTS}/STEP"
    )
    path = pathlib.Path(path).resolve()
    if _is_checkpoint(path):
        run, steps = path.parent.parent, [int(path.name)] if path.is_dir() else []
    else:
        run = path.parent if path.name == CHECKPOINTS else path
        steps = retention.complete(run / CHECKPOINTS)[::-1]
    if not steps:
        raise UserError(
            f"{path} is neither a run directory of train with a checkpoint nor one of its {CHECKPOINTS}/STEP"
        )
    return run, steps


def _is_checkpoint(path: pathlib.Path) -> bool:
    return path.parent.name == CHECKPOINTS and path.name.isdigit()


def require_prm_directory(path: str | pathlib.Path, otherwise: str = "") -> None:
    """UserError unless a path is a directory; of RUN/best, with the reason why a run has none.

    Args:
      otherwise: text of the error of any other path.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return
    if path.name == retention.BEST and (path.parent / CHECKPOINTS).is_dir():
        raise UserError(
            f"{path}: this run has no best checkpoint: train keeps one with --keep_best={'|'.join(EVAL_METRICS)}, at "
            f"an evaluation on held-out questions. Its newest checkpoint is that of {path.parent}"
        )
    raise UserError(
        otherwise or f"{path} is not a directory; expected a run of train, a checkpoint or a Hugging Face directory"
    )


def read_meta(run: pathlib.Path, step: int) -> dict[str, Any]:
    """The meta item of a checkpoint of a run directory: fingerprint, configuration, step, metrics.

    Raises:
      UserError: it is missing or damaged.
    """
    return orbax_files.read_json(run / CHECKPOINTS / str(step), "meta")
