"""The output of frozen layers for solutions: from a cache where it is there, else computed and stored.

Solutions whose distinct tokens are stored together are a unit; see :mod:`cfprm_jax.data.trunk_cache`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int64

from cfprm_jax.checkpoints import frozen
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.prefix_places import PrefixPlaces, path_columns
from cfprm_jax.data.trunk_cache import TrunkCache
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.safetensors_files import fingerprint, list_directory
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.row_plan import ScoringBatch
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import Params, walk
from cfprm_jax.models.partition import Partition, trunk_of
from cfprm_jax.runtime import caches, determinism, digests
from cfprm_jax.sharding import rules

# What is computed is stored as often, so that a kill costs no more, and before it fills the memory.
_STORE_SECONDS, _STORE_BYTES = 10.0, 1 << 28
# What config.json decides beside the shapes of the weights.
_ARCHITECTURE = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
OFF = "off"


class Unit(NamedTuple):
    """Solutions whose distinct tokens are stored together.

    Attributes:
      key: of the cache.
      members: the solutions, by their numbers in a plan.
      places: of their tokens in the unit; solution k of it is members[k].
    """

    key: str
    members: list[int]
    places: PrefixPlaces


def unit_of(members: Sequence[int], encoded: Sequence[Encoded]) -> Unit:
    """The unit of these members of the solutions."""
    tokens = [encoded[i].tokens for i in members]
    places = PrefixPlaces.of(tokens)
    return Unit(places.digest(tokens.__getitem__), list(members), places)


class TrunkComputation:
    """Computes the frozen layers of one network.

    Attributes:
      layers: how many they are.
    """

    def __init__(
        self, partition: Partition, load: Callable[[], Params], mesh: Mesh, *, deterministic: bool = False
    ) -> None:
        """A trunk whose parameters are loaded when they are first needed.

        Args:
          load: gives {"embedding", "layers"}, in their shardings.
          deterministic: compiled to give the same bits every time (:mod:`cfprm_jax.runtime.determinism`).
        """
        self.layers = partition.frozen_layers
        self._load = load
        self._params: Params | None = None
        self._sharding = NamedSharding(mesh, PartitionSpec(rules.ROW_AXES))
        apply = functools.partial(prm.trunk, partition.network, constrain=rules.constrain_activations(mesh))
        options = determinism.compiler_options(deterministic, mesh.devices.flat[0].platform)
        self._forward = jax.jit(apply, out_shardings=rules.replicated(mesh), compiler_options=options)

    def __call__(self, batch: ScoringBatch) -> jax.Array:
        """The hidden states [rows, length, width] of a batch, handed to the device."""
        if self._params is None:
            self._params = self._load()
        rows = (jax.make_array_from_callback(x.shape, self._sharding, x.__getitem__) for x in batch.rows)
        return self._forward(self._params, *rows)

    def free(self) -> None:
        """Let go of the parameters."""
        self._params = None


class CachedTrunk:
    """A trunk, and the cache of its output."""

    def __init__(self, trunk: TrunkComputation, cache: TrunkCache) -> None:
        self.layers = trunk.layers
        self.cache = cache
        self._trunk = trunk
        self._verified: set[str] = set()
        self._complete: dict[str, Any] = {}  # computed, and not stored yet
        self._stored = time.monotonic()

    def units(self, questions: Sequence[str], encoded: Sequence[Encoded], members: Sequence[int]) -> list[Unit]:
        """A unit for the members that answer a question, of every question."""
        groups: dict[str, list[int]] = {}
        for i in members:
            groups.setdefault(questions[i], []).append(i)
        return [unit_of(group, encoded) for group in groups.values()]

    def hidden(
        self, batches: Sequence[ScoringBatch], units: Sequence[Unit]
    ) -> Iterator[tuple[ScoringBatch, Float[np.ndarray, "rows length width"]]]:
        """Every batch of a plan with its hidden states; what is missing is computed and stored first.

        Args:
          units: in which every member of the batches is.
        """
        self.verify(unit.key for unit in units)
        self.fill(batches, units)
        self.store()
        own = {i: (unit, k) for unit in units for k, i in enumerate(unit.members)}
        for batch in batches:
            places = np.full(batch.rows[0].shape, -1, np.int64)
            for i, steps in zip(batch.members, batch.steps, strict=True):
                unit, k = own[i]
                row, columns = path_columns(batch.rows[2], steps[-1])
                places[row, columns] = self.cache.begin(unit.key) + unit.places.path(k)
            yield batch, gathered(self.cache, places)

    def verify(self, keys: Iterable[str]) -> None:
        """Compare units that are there with their checksums, each once in the life of this object.

        Raises:
          UserError: one has changed.
        """
        new = set(keys) - self._verified
        self.cache.verify(new)
        self._verified |= new

    def fill(self, batches: Sequence[ScoringBatch], units: Sequence[Unit]) -> None:
        """Compute the batches that hold members of units that are not there; :meth:`store` puts them into the cache."""
        missing = set(self.cache.missing(unit.key for unit in units)) - self._complete.keys()
        # Equal solutions of two records make one unit.
        chosen = {unit.key: unit for unit in units if unit.key in missing}
        own = {i: (unit, k) for unit in chosen.values() for k, i in enumerate(unit.members)}
        left = {key: len(unit.members) for key, unit in chosen.items()}
        states: dict[str, Any] = {}
        selected = [batch for batch in batches if any(i in own for i in batch.members)]
        started = (self._trunk(batch) for batch in selected)
        ahead: collections.deque[jax.Array] = collections.deque()
        for batch in selected:
            # The device computes the next batch while the host takes this one apart.
            while len(ahead) < 2 and (following := next(started, None)) is not None:
                ahead.append(following)
            hidden = np.asarray(ahead.popleft())
            for i, steps in zip(batch.members, batch.steps, strict=True):
                if i not in own:
                    continue
                unit, k = own[i]
                if unit.key not in states:
                    states[unit.key] = np.empty((unit.places.tokens, hidden.shape[-1]), hidden.dtype)
                row, columns = path_columns(batch.rows[2], steps[-1])
                states[unit.key][unit.places.path(k)] = hidden[row, columns]
                left[unit.key] -= 1
                if not left[unit.key]:
                    self._complete[unit.key] = states.pop(unit.key)
            size = sum(state.nbytes for state in self._complete.values())
            if time.monotonic() - self._stored > _STORE_SECONDS or size > _STORE_BYTES:
                self.store()

    def free(self) -> None:
        """Let go of the parameters of the trunk; they are loaded again if something is missing."""
        self._trunk.free()

    def store(self) -> None:
        """Put what is computed into the cache.

        Raises:
          UserError: it cannot be written.
        """
        if self._complete:
            self.cache.append(list(self._complete.items()))
        self._complete, self._stored = {}, time.monotonic()


def gathered(cache: TrunkCache, places: Int64[np.ndarray, "rows length"]) -> Float[np.ndarray, "rows length width"]:
    """The hidden states of rows whose tokens stand at these places of a cache; 0 where there is -1."""
    known = places >= 0
    found = cache.take(places[known])
    out = np.zeros((*places.shape, cache.width), found.dtype)
    plain = np.dtype(f"u{found.dtype.itemsize}")  # NumPy copies bfloat16 element by element
    out.view(plain)[known] = found.view(plain)
    return out


def open_cache(
    option: str,
    partition: Partition,
    directory: pathlib.Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> TrunkCache:
    """The cache that --cache_frozen names; auto is a directory in the user's cache, one for each trunk.

    Args:
      directory: of the frozen weights.

    Raises:
      UserError: it is the cache of other weights, layers, types or tokenizers, or damaged.
    """
    network = partition.network
    identity = identity_of(partition, directory, tokenizer)
    path = pathlib.Path(option)
    if option == caches.AUTO:
        path = caches.cache_directory(option, "trunks") / digests.of_json([identity, network.dtype])[:32]
    return TrunkCache(path, identity, network.backbone.hidden_size, network.dtype)


def for_scoring(
    option: str, loaded: LoadedPRM, model: str | pathlib.Path, mesh: Mesh, *, deterministic: bool = False
) -> CachedTrunk | None:
    """The trunk of a run of train that froze layers, with the cache that --cache_frozen names; None for "off".

    Runs that froze the same layers of the same weights share a cache, whatever they trained above.

    Args:
      deterministic: as of :class:`TrunkComputation`.

    Raises:
      UserError: no layers of the PRM are frozen, or as of :func:`open_cache`.
    """
    if option == OFF:
        return None
    partition, record = frozen.partition_of(loaded.meta, loaded.config), frozen.described(loaded.meta)
    if record is None or not partition.frozen_layers:
        raise UserError(
            f"--cache_frozen={option:.80}: {model} has no frozen layers; it is for runs of train with --frozen_layers"
        )
    cache = open_cache(option, partition, frozen.backbone_directory(record), loaded.tokenizer)
    params, layers = loaded.params, partition.frozen_layers
    computation = TrunkComputation(partition, lambda: trunk_of(params, layers), mesh, deterministic=deterministic)
    return CachedTrunk(computation, cache)


def identity_of(
    partition: Partition, directory: pathlib.Path, tokenizer: transformers.PreTrainedTokenizerBase
) -> Mapping[str, Any]:
    """What hidden states depend on, beside tokens and type."""
    names = {name for _, spec in walk(partition.trunk) for name in spec.hf_names()}
    tensors = [t for t in list_directory(directory).tensors if t.name in names or f"model.{t.name}" in names]
    net = partition.network.backbone
    return {
        **{name: getattr(net, name) for name in _ARCHITECTURE},
        "rope_scaling": None if net.rope_scaling is None else dataclasses.asdict(net.rope_scaling),
        "weights": fingerprint(tensors),
        "frozen_layers": partition.frozen_layers,
        "tokenizer": digests.of_json(sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])),
    }


def load_trunk(partition: Partition, directory: pathlib.Path, mesh: Mesh) -> Params:
    """{"embedding", "layers"} of a partition from a Hugging Face directory, in the type that it is computed in."""
    network = partition.network
    return frozen.load(network, {"trunk": partition.trunk}, directory, network.dtype, mesh)["trunk"]
