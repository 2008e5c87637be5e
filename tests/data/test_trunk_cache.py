"""Places of distinct tokens against a trie, and a cache of hidden states that is damaged, cut, or full."""

from __future__ import annotations

import json
import resource
import signal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import pack
from cfprm_jax.data.prefix_places import PrefixPlaces, path_columns
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.data.trunk_cache import TrunkCache
from cfprm_jax.errors import UserError

IDENTITY = {"weights": "a" * 64, "frozen_layers": 2, "tokenizer": "b" * 64}
WIDTH = 4
SEQUENCES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=12)


@given(SEQUENCES)
def test_every_prefix_has_one_place(lists):
    sequences = [np.array(tokens, np.int32) for tokens in lists]
    places = PrefixPlaces.of(sequences)
    found = {}
    for number, tokens in enumerate(lists):
        path = places.path(number)
        assert len(path) == len(tokens)
        for depth, place in enumerate(path):
            assert found.setdefault(tuple(tokens[: depth + 1]), place) == place
    assert sorted(found.values()) == list(range(places.tokens))
    # The key is that of the set of sequences as it is stored.
    key = places.digest(sequences.__getitem__)
    other = PrefixPlaces.of(sequences[::-1])
    assert other.digest(sequences[::-1].__getitem__) == key
    longer = [*sequences[:-1], np.append(sequences[-1], np.int32(9))]
    assert PrefixPlaces.of(longer).digest(longer.__getitem__) != key


@given(SEQUENCES, st.sampled_from(["tree", "sequence", "none"]))
def test_the_columns_of_a_solution_hold_its_tokens(lists, packing):
    encoded = [
        Encoded(np.array(tokens, np.int32), np.array([len(tokens) - 1], np.int32), np.ones(1, np.float32), 0)
        for tokens in lists
    ]
    batch = pack(encoded, packing, RowShapes(((len(lists), 16),)), len(lists), 1)
    for tokens, steps in zip(lists, batch.step_positions, strict=True):
        row, columns = path_columns(batch.subtree_end, steps[0])
        assert batch.tokens[row, columns].tolist() == tokens


def states(seed: int, tokens: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, WIDTH)).astype(dtype)


@pytest.fixture
def cache(tmp_path) -> TrunkCache:
    made = TrunkCache(tmp_path / "cache", IDENTITY, WIDTH, "bfloat16")
    made.append([("one", states(1, 5)), ("two", states(2, 3))])
    return made


def again(cache: TrunkCache, **changes) -> TrunkCache:
    return TrunkCache(cache.directory, {**IDENTITY, **changes}, WIDTH, "bfloat16")


def test_what_is_stored_is_found(cache):
    """To the bit, by this and by another process that has it open, and whatever is stored twice is there once."""
    other = again(cache)
    other.append([("two", states(2, 3)), ("three", states(3, 2))])
    cache.append([("four", states(4, 1))])
    for reader in (cache, again(cache)):
        assert reader.missing(["four", "five", "one", "five"]) == ["five"]
        reader.verify(["one", "two", "three", "four", "five"])
        for seed, (key, tokens) in enumerate([("one", 5), ("two", 3), ("three", 2), ("four", 1)], 1):
            found = reader.take(reader.begin(key) + np.arange(tokens))
            assert found.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(found.view(np.uint16), states(seed, tokens).view(np.uint16))
    assert (cache.directory / "hidden.bin").stat().st_size == 11 * WIDTH * 2


def test_bytes_that_no_index_names_are_written_over(cache):
    """As a kill between the two files leaves them."""
    with (cache.directory / "hidden.bin").open("ab") as file:
        file.write(b"half of a unit")
    reopened = again(cache)
    reopened.append([("three", states(3, 2))])
    reopened.verify(["one", "two", "three"])
    assert (cache.directory / "hidden.bin").stat().st_size == 10 * WIDTH * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "c" * 64}, r"weights was aaaaaaaaaaaaaaaa\.\.\. and is cccccccccccccccc\.\.\.; choose another"),
        ({"frozen_layers": 3}, "frozen layers was 2 and is 3"),
        (
            {"tokenizer": "d" * 64, "frozen_layers": 1},
            r"frozen layers was 2 and is 1; tokenizer was b+\.\.\. and is d+",
        ),
    ],
)
def test_another_trunk_is_refused_with_every_difference(cache, changes, message):
    with pytest.raises(UserError, match=message):
        again(cache, **changes)


def test_another_type_is_refused(cache):
    with pytest.raises(UserError, match="dtype was bfloat16 and is float32"):
        TrunkCache(cache.directory, IDENTITY, WIDTH, "float32")


def test_damage_is_found(cache):
    data = cache.directory / "hidden.bin"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    reopened = again(cache)
    reopened.verify(["one"])
    with pytest.raises(UserError, match=r"hidden\.bin has changed: .* delete the directory"):
        reopened.verify(["one", "two"])
    data.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"hidden\.bin is truncated: it has 63 bytes, expected 64"):
        again(cache)
    data.unlink()
    with pytest.raises(UserError, match=r"hidden\.bin is missing, expected 64"):
        again(cache)
    index = cache.directory / "index.json"
    described = json.loads(index.read_text())
    described["content"]["one"][1] = 4
    index.write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"index\.json is damaged: has changed"):
        again(cache)


def test_a_full_disk_is_one_error_and_loses_nothing(cache):
    """The limit on the size of a file stands for it: the system's error comes from the same call."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(UserError, match=r"cannot write 7\.8 KiB to .*hidden\.bin: File too large, .* are free"):
            cache.append([("large", states(9, 1000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (cache.directory / "hidden.bin").stat().st_size == 64
    cache.append([("three", states(3, 2))])
    again(cache).verify(["one", "two", "three"])
    with pytest.raises(UserError, match=r"1,000,000,000,000,000 tokens need .* has .* free"):
        cache.require_room(10**15)
