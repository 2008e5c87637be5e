"""Shares of questions."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.errors import UserError
from cfprm_jax.runtime.shards import Shard, parse, resolve


@given(st.text(), st.integers(1, 50))
def test_every_question_is_in_one_share(question, count) -> None:
    assert sum(Shard(index, count).owns(question) for index in range(count)) == 1


def test_the_hash_is_the_same_everywhere() -> None:
    """The first eight bytes of SHA-256, big-endian: of "abc" ba7816bf8f01cfea."""
    assert Shard.of("abc", 1000) == 0xBA7816BF8F01CFEA % 1000


def test_names() -> None:
    assert parse("") is None and parse("2/8") == Shard(2, 8) and str(Shard(2, 8)) == "2/8"
    assert Shard(2, 8).path("a/b.jsonl.gz") == pathlib.Path("a/b.00002-of-00008.jsonl.gz")
    assert Shard(0, 1).path("b") == pathlib.Path("b.00000-of-00001")


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("Qwen2.5-7B.jsonl", "Qwen2.5-7B.00002-of-00008.jsonl"),
        ("v1.5.jsonl.gz", "v1.5.00002-of-00008.jsonl.gz"),
        ("process_bench_v1.5", "process_bench_v1.5.00002-of-00008"),
        ("Qwen2.5-7B", "Qwen2.5-7B.00002-of-00008"),
        ("a.gz", "a.00002-of-00008.gz"),
        ("rows.txt", "rows.00002-of-00008.txt"),
        ("data.00000-of-00001.jsonl", "data.00000-of-00001.00002-of-00008.jsonl"),
    ],
)
def test_dots_in_a_name_stay_together(output, part) -> None:
    """A part matches the pattern OUTPUT.*-of-*, and from one part's name the others follow."""
    found = Shard(2, 8).path(pathlib.Path("folder.d") / output)
    assert found == pathlib.Path("folder.d") / part
    assert Shard(7, 8).beside(found) == Shard(7, 8).path(pathlib.Path("folder.d") / output)


def test_files_beside_a_part_have_its_share_where_that_part_has_it() -> None:
    log = pathlib.Path("folder.d/Qwen2.5.00002-of-00008.rollouts.jsonl.gz")
    assert Shard(7, 8).beside(log) == pathlib.Path("folder.d/Qwen2.5.00007-of-00008.rollouts.jsonl.gz")
    named = pathlib.Path("a.00001-of-00002.00002-of-00008.jsonl")  # the output of one share, shared again
    assert Shard(3, 8).beside(named) == pathlib.Path("a.00001-of-00002.00003-of-00008.jsonl")


@pytest.mark.parametrize("text", ["8/8", "1", "-1/8", "0/0", "a/b", "0/100001", "1/8 ", "٣/٨"])
def test_what_is_no_share(text) -> None:
    with pytest.raises(UserError, match="INDEX/COUNT"):
        parse(text)


def test_auto_is_the_launchers(monkeypatch) -> None:
    assert resolve("3/4", {}) == "3/4" and resolve("auto", {}) == "0/1"
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    chosen = {}
    monkeypatch.setattr("jax.config.update", chosen.__setitem__)
    assert resolve("auto", slurm) == "3/4"
    assert chosen == {"jax_cuda_visible_devices": "1"}
    indexed = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "8", "JOB_COMPLETION_INDEX": "5"}
    assert resolve("auto", indexed) == "5/8"
