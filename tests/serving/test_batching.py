"""The batching policy, and the queue between requests and the scorer."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.inference.prefix_rows import Tokens
from cfprm_jax.serving.batching import BatchPolicy, JobQueue


def sequence(size: int) -> Tokens:
    return Tokens(np.zeros(size, np.int32), np.array([size - 1], np.int32))


def test_a_batch_waits_for_tokens_or_time() -> None:
    policy = BatchPolicy(batch_tokens=10, max_wait=0.5)
    assert policy.wait([4, 5], waited=0.2) == pytest.approx(0.3)
    assert policy.wait([4, 6], waited=0.0) == 0
    assert policy.wait([4], waited=0.6) < 0


@pytest.mark.parametrize(("sizes", "count"), [([4, 5, 6], 2), ([4, 6], 2), ([40, 1], 1), ([1], 1), ([3, 40, 1], 1)])
def test_a_batch_is_full_or_one_request(sizes, count) -> None:
    assert BatchPolicy(10, 0.5).count(sizes) == count


def test_jobs_come_out_in_order_without_the_cancelled() -> None:
    queue = JobQueue(BatchPolicy(10, 0.0))
    jobs = [queue.put([sequence(4)]) for _ in range(5)]
    jobs[1].future.cancel()
    assert queue.take() == [jobs[0], jobs[2]]
    assert queue.take() == [jobs[3], jobs[4]]
    assert not jobs[0].future.cancel()


def test_a_closed_queue_is_emptied_first() -> None:
    queue = JobQueue(BatchPolicy(100, 60.0))
    job = queue.put([sequence(4)])
    queue.close()
    assert queue.take() == [job]
    assert queue.take() == []
    with pytest.raises(RuntimeError):
        queue.put([sequence(1)])
