"""Checkpoints of a run: saved in the background, restored onto any mesh, compared before they are trusted.

A checkpoint holds three items: `state` (parameters, optimizer state, step), `data` (the position in the data as JSON,
the same on every process, so that their number may change), and `meta` (fingerprint, configuration, metrics). Orbax
writes it under a temporary name and renames it when all of it is on disk: a run that dies during a save leaves the
checkpoint before it as the newest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import transformers
from etils import epath
from jax.sharding import Mesh

from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.models import hf
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import abstract_params, param_specs
from cfprm_jax.training import sharding
from cfprm_jax.training.run_directory import CHECKPOINTS, MODEL, PRM_FILE, compute_dtype, read_prm
from cfprm_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back."""

    state: TrainState
    data: dict[str, Any]  # of the loader's iterator
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run directory, the newest `keep` of them. Close it to wait for the last save."""

    def __init__(self, output_dir: str | pathlib.Path, keep: int):
        self.directory = pathlib.Path(output_dir).resolve() / CHECKPOINTS
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Begin to save. The arrays are copied before this returns, so the state may be donated to the next step."""
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    data=ocp.args.JsonSave(dict(data)),
                    meta=ocp.args.JsonSave(dict(meta)),
                ),
                force=True,
            )

    def wait(self) -> None:
        """Until everything that was to be saved is on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def meta(self, step: int) -> dict[str, Any]:
        """The meta item of a checkpoint, without reading its arrays."""
        with _damaged(self.directory / str(step)):
            return dict(self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta)

    def restore(self, step: int, abstract_state: TrainState) -> Restored:
        """The checkpoint of a step, laid out as abstract_state says.

        Args:
          abstract_state: jax.ShapeDtypeStruct with a sharding in every leaf; any mesh.

        Raises:
          UserError: files are missing or damaged, or the stored arrays differ from abstract_state in name, shape or
            type; all differences are listed.
        """
        with _damaged(self.directory / str(step)):
            stored = self._manager.item_metadata(step)["state"]
            _require_equal(f"{self.directory / str(step)}", _described(abstract_state), _described(stored.tree))
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract_state),
                    data=ocp.args.JsonRestore(),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        return Restored(restored.state, dict(restored.data), dict(restored.meta))

    def close(self) -> None:
        """Wait for the last save and let go of the directory."""
        with self._writing():
            self._manager.close()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return _explained(f"cannot write a checkpoint into {self.directory}")


def _described(tree: Any) -> dict[str, str]:
    """Name -> "float32 [3, 4]" of every array of a tree; named tuples and dicts alike."""
    flat = ocp.tree.to_flat_dict(tree, sep="/")
    return {
        name: f"{jnp.dtype(leaf.dtype)} {list(leaf.shape)}" for name, leaf in flat.items() if hasattr(leaf, "shape")
    }


def _require_equal(where: str, expected: dict[str, str], found: dict[str, str]) -> None:
    # Orbax itself restores what is stored, with the stored shapes, without a word.
    differences = [
        f"{name}: expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in dict.fromkeys([*expected, *found])
        if expected.get(name) != found.get(name)
    ]
    if differences:
        raise UserError(f"checkpoint {where} does not fit this model and optimizer: {'; '.join(differences)}")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Orbax's many ways to say that files are missing or damaged or cannot be written, as one UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{what}: {' '.join(str(error).split())[:300]}") from error


def _damaged(checkpoint: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    return _explained(f"checkpoint {checkpoint} is damaged")


@dataclasses.dataclass(frozen=True)
class LoadedPRM:
    """A trained PRM, ready to score."""

    config: PRMConfig
    params: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    encoding: EncodingConfig
    meta: dict[str, Any]  # prm.json: loss, granularities, ...; and "step"


def newest(output_dir: pathlib.Path) -> int | None:
    """Step of the newest complete checkpoint of a run directory, which may not exist; nothing is created."""
    folder = output_dir / CHECKPOINTS
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)  # one being written has a longer name


def locate(path: str | pathlib.Path) -> tuple[pathlib.Path, int]:
    """(run directory, step) of a run directory (its newest checkpoint) or of one of its checkpoints/STEP.

    Raises:
      UserError: there is no checkpoint.
    """
    path = pathlib.Path(path).resolve()
    if path.parent.name == CHECKPOINTS and path.name.isdigit():
        run, step = path.parent.parent, int(path.name) if path.is_dir() else None
    else:
        run = path.parent if path.name == CHECKPOINTS else path
        step = newest(run)
    if step is None:
        raise UserError(
            f"{path} is neither a run directory of train with a checkpoint nor one of its {CHECKPOINTS}/STEP"
        )
    return run, step


def read_meta(run: pathlib.Path, step: int) -> dict[str, Any]:
    """The meta item of a checkpoint of a run directory: fingerprint, configuration, step, metrics.

    Raises:
      UserError: it is missing or damaged.
    """
    with contextlib.closing(ocp.JsonCheckpointHandler()) as handler, _damaged(run / CHECKPOINTS / str(step)):
        return dict(handler.restore(epath.Path(run / CHECKPOINTS / str(step) / "meta")))


def load_for_inference(
    path: str | pathlib.Path, dtype: str = "auto", attention: str = "auto", mesh: Mesh | None = None
) -> LoadedPRM:
    """The PRM of a run directory or of one of its checkpoints. Of the state only the parameters are read.

    Args:
      path: a run directory (its newest checkpoint) or checkpoints/STEP in one.
      dtype: type that the network computes in, and of its weights; the reward head's stay float32, as its output does.
        "auto" is the type that the run computed in.
      attention: attention backend.
      mesh: where the parameters go; by default one device.

    Raises:
      UserError: no checkpoint there, or one whose parameters are not those that its own model/ directory describes.
    """
    run, step = locate(path)
    model = run / MODEL
    meta, encoding = read_prm(model)
    if encoding is None:
        raise UserError(f"{model} has no {PRM_FILE}, which train writes there")
    backbone, raw = hf.read_config(model)
    dtype = compute_dtype(dtype, meta, raw)
    config = PRMConfig(backbone=backbone, head=meta["head"], dtype=dtype, attention=attention, remat="none")

    mesh = mesh or sharding.make_mesh(DeviceConfig(), jax.devices()[:1])
    shardings = sharding.param_shardings(mesh, param_specs(config))
    params = abstract_params(config, dtype, shardings)
    return LoadedPRM(
        config=config,
        params=_read_params(run, step, params),
        tokenizer=load_tokenizer(model, encoding.marker, backbone.vocab_size),
        encoding=encoding,
        meta={**meta, "step": step},
    )


def _read_params(run: pathlib.Path, step: int, params: Any) -> Any:
    """The parameters of a stored state, cast and laid out as the abstract ones; nothing else of it is read."""

    def shapes(tree: Any) -> dict[str, str]:
        return {name: str(list(leaf.shape)) for name, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()}

    directory = epath.Path(run / CHECKPOINTS / str(step) / "state")
    # The item's handler alone: a manager would also want to know the items that are not read here.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler, _damaged(run / CHECKPOINTS / str(step)):
        stored = handler.metadata(directory).tree["params"]
        _require_equal(str(directory.parent), shapes(params), shapes(stored))
        item = {"params": params}
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        return handler.restore(directory, args=arguments)["params"]
