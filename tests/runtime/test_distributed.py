"""Real processes: how they find each other, train as one, agree to stop, and end together when one of them fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny_runs import BEFORE_BEST_OF_N, ROOT, before_step, finish, free_port, rows, same_result, wait_for_step

from cfprm_jax.checkpoints import saving
from cfprm_jax.config import DistributedConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.runtime import distributed
from cfprm_jax.runtime.distributed import Layout, detect
from cfprm_jax.training import step

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
}
OPTIONS = {"eval_every": 5, "bon_n": "2,4", "max_steps": 20}
EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


def test_flags_name_the_layout() -> None:
    config = DistributedConfig(coordinator="host:99", num_processes=4, process_id=3)
    assert detect(config, STEP) == Layout("host:99", 4, 3, None)
    assert detect(DistributedConfig(coordinator="host:99", num_processes=1, process_id=0), {}) is None
    assert detect(DistributedConfig(), {}) is None
    for config, message in (
        (DistributedConfig(num_processes=4, process_id=3), "missing: --coordinator"),
        (DistributedConfig(coordinator="host:99"), "missing: --num_processes, --process_id"),
        (DistributedConfig(coordinator="host:99", num_processes=4, process_id=4), "an index below it"),
        (DistributedConfig(coordinator="host", num_processes=4, process_id=0), "HOST:PORT"),
    ):
        with pytest.raises(UserError, match=message):
            detect(config, {})


def test_kubernetes_names_it_in_the_environment() -> None:
    pod = {"JAX_COORDINATOR_ADDRESS": "pod-0:8476", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"}
    assert detect(DistributedConfig(), pod) == Layout("pod-0:8476", 2, 1, None)
    assert detect(DistributedConfig(), pod | {"JAX_PROCESS_ID": "0"}) == Layout("pod-0:8476", 2, 0, None)
    assert detect(DistributedConfig(distributed="off"), pod) is None
    with pytest.raises(UserError, match="missing: JAX_COORDINATOR_ADDRESS"):
        detect(DistributedConfig(), {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"})


def test_slurm_names_it_in_the_environment() -> None:
    """A process a GPU takes its own, one that sees its own only or has a node takes all; no step is no layout."""
    layout = detect(DistributedConfig(), STEP | EIGHT)
    assert layout == Layout(layout.coordinator, 16, 11, (3,))
    assert layout.coordinator.startswith("gpu03:")
    assert 20000 <= int(layout.coordinator.split(":")[1]) < 30000
    assert detect(DistributedConfig(), STEP | {"CUDA_VISIBLE_DEVICES": "3"}).local_device_ids is None
    assert detect(DistributedConfig(), STEP).local_device_ids is None
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert detect(DistributedConfig(), STEP | alone | EIGHT).local_device_ids is None
    other = detect(DistributedConfig(), STEP | {"SLURM_STEP_ID": "1"})
    assert other.coordinator != layout.coordinator
    assert detect(DistributedConfig(), STEP | {"JAX_COORDINATOR_PORT": "7"}).coordinator == "gpu03:7"
    assert detect(DistributedConfig(), STEP | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    batch_script = {"SLURM_JOB_ID": "1234", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
    assert detect(DistributedConfig(), batch_script) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("a[03-10,12],b", "a03"),
        ("a[7,9]", "a7"),
        ("gpu[1-2].cluster", "gpu1.cluster"),
        ("node-a[001-002]", "node-a001"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert distributed.first_host(nodes) == first


def test_tasks_on_node() -> None:
    assert [distributed.tasks_on_node("8(x2),4,1(x2)", node) for node in range(5)] == [8, 8, 4, 1, 1]


def test_a_single_process_uses_no_store() -> None:
    processes = distributed.Processes()
    assert processes.first
    assert processes.gather(3) == [3]
    assert processes.share(lambda: "a") == "a"
    processes.barrier()
    processes.require_equal("x", {"y": 1})
    with pytest.raises(ValueError, match="passes"), processes.guard():
        raise ValueError("passes")


def test_a_vote_is_that_of_the_call_before_and_lasts() -> None:
    """So that no host waits for its devices; among several processes, here played by one."""
    own: list[signal.Signals | None] = [None]
    vote = distributed.StopVote(lambda: own[0], jax.devices(), count=2)
    assert [vote(), vote()] == [False, False]
    own[0] = signal.SIGTERM
    assert [vote(), vote()] == [False, True]
    own[0] = None
    assert vote() and vote.received == signal.SIGTERM
    alone = distributed.StopVote(lambda: own[0], jax.devices(), count=1)
    assert not alone()
    own[0] = signal.SIGINT
    assert alone() and alone.received == signal.SIGINT


@pytest.fixture(scope="module")
def candidates(tiny) -> str:
    path = tiny.directory / "candidates.jsonl"
    texts = [{"text": f"1+{i}\n\n{i}", "correct": i == 2} for i in range(4)]
    path.write_text(
        "".join(json.dumps({"id": q, "question": q, "answer": "2", "candidates": texts}) + "\n" for q in "abc")
    )
    return f"--bon_candidates={path}"


@pytest.fixture(scope="module")
def two(tiny, candidates):
    """A run of two processes that split the weights, up to Best-of-N; what both printed."""
    given = tiny.arguments("two", mesh="fsdp=-1", **OPTIONS)
    return tiny.directory / "two", [finish(process) for process in tiny.start_two([*given, candidates])]


def without_none(row: dict) -> dict:
    return {name: value for name, value in row.items() if value is not None}


def test_two_processes_equal_one(tiny, two, candidates) -> None:
    run, (first, second) = two
    assert "2 x cpu (cpu) in 2 processes, mesh data=1, fsdp=2" in first
    assert "held-out" in first
    assert all(line.startswith("[Gloo]") for line in second.splitlines())
    given = tiny.arguments("one", **OPTIONS)
    finish(tiny.start([*given, candidates]))
    one = rows(tiny.directory / "one")
    assert [row["step"] for row in rows(run)] == [row["step"] for row in one]
    for mine, theirs in zip(rows(run), one, strict=True):
        assert {k for k, v in mine.items() if v is None} == {k for k, v in theirs.items() if v is None}
        # The ranks of a few nearly equal scores may swap.
        assert mine.pop("eval_auroc", 0) == pytest.approx(theirs.pop("eval_auroc", 0), abs=0.02)
        assert without_none(mine) == pytest.approx(without_none(theirs), rel=1e-5, abs=1e-5)
    loaded = [loaded_prm.load_for_inference(directory, "float32") for directory in (run, tiny.directory / "one")]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *(one.params for one in loaded))
    results = [json.loads((d / "best_of_n" / "results.json").read_text()) for d in (run, tiny.directory / "one")]
    assert results[0]["rows"] == results[1]["rows"]
    # The flags of the run, without those of the processes: a single process can resume it.
    assert "--num_processes=0" in (run / "run.flags").read_text()


def test_a_signal_to_one_stops_both_at_one_step(tiny, two, candidates) -> None:
    """Only the second receives it; both save, exit with the given status, and resume to the same end."""
    run = tiny.directory / "signalled"
    options = {**OPTIONS, "mesh": "fsdp=-1", "checkpoint_every": 1000, "preemption_exit_code": 75}
    given = [*tiny.arguments("signalled", **options), candidates]
    processes = tiny.start_two(given, patch=before_step(8))
    wait_for_step(processes[0], run, 4)
    processes[1].send_signal(signal.SIGTERM)
    tiny.release(processes[1])
    text, _ = [finish(process, status=75) for process in processes]
    assert "stopped by SIGTERM after step" in text
    assert len(rows(run)) < len(rows(two[0]))
    for process in tiny.start_two([f"--flagfile={run / 'run.flags'}", "--resume=auto"]):
        finish(process)
    same_result(two[0], run)


@pytest.mark.parametrize(("line", "saved"), [("model", False), pytest.param("done", True, marks=pytest.mark.slow)])
def test_a_signal_to_one_ends_both_where_nothing_is_left_to_save(tiny, candidates, line: str, saved: bool) -> None:
    """Before the first step and in Best-of-N: process 0, which did not receive it, prints it, and only once."""
    run = tiny.directory / f"ended_{line}"
    options = {**OPTIONS, "max_steps": 2, "preemption_exit_code": 75}
    patch = BEFORE_BEST_OF_N if saved else before_step(1)
    first, second = tiny.start_two([*tiny.arguments(run.name, **options), candidates], patch=patch)
    printed = [next(text for text in first.stdout if text.startswith(line))]
    second.send_signal(signal.SIGTERM)
    printed.append(first.stdout.read())
    assert (first.wait(60), second.wait(60)) == (75, 75)
    resume = f"step 2 is saved; resume with: python -m cfprm_jax.train --flagfile={run}/run.flags --resume=auto"
    expected = f"stopped by SIGTERM; {resume if saved else 'no step is saved yet'}"
    assert "".join(printed).count("stopped by SIGTERM") == 1 and expected in printed[-1]
    assert "stopped by" not in second.stdout.read()


def ended(process: subprocess.Popen, seconds: float) -> tuple[int, str]:
    """Exit status and output of a process that must end by itself within the given seconds."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still there after {seconds} s: {process.communicate()[0]}") from None
    return process.returncode, text


def test_the_reason_of_one_ends_both(tiny) -> None:
    """The second cannot read its corpus, while the first waits for it."""
    missing = f"--train_data={tiny.directory / 'nowhere.jsonl'}"
    processes = tiny.start_two(tiny.arguments("one_fails"), missing)
    (status, text), (other_status, other_text) = (ended(process, 120) for process in processes)
    assert (status, other_status) == (2, 2)
    reason = "error: process 1 of 2: "
    assert reason in text and "nowhere.jsonl: no such file" in text
    assert reason in other_text
    assert "Traceback" not in text + other_text


def test_different_flags_are_refused(tiny) -> None:
    """Times to evaluate too: the result does not depend on them, but one process would wait for the other for ever."""
    processes = tiny.start_two(tiny.arguments("different"), "--learning_rate=0.02", "--eval_every=1")
    texts = [ended(process, 120) for process in processes]
    assert [status for status, _ in texts] == [2, 2]
    (line,) = [line for line in texts[0][1].splitlines() if line.startswith("error: ")]
    assert "learning_rate is 0.02 in process 1, 0.01 in 0" in line and "eval_every is 1 in process 1, " in line
    assert line.count(" in process 1, ") == 2


def test_one_that_is_killed_ends_the_other(tiny) -> None:
    processes = tiny.start_two(tiny.arguments("one_killed"), patch=before_step(6))
    wait_for_step(processes[0], tiny.directory / "one_killed", 2)
    processes[1].kill()
    begin = time.monotonic()
    status, text = ended(processes[0], 60)
    assert status not in (0, None)
    assert "error: process 0 of 2: " in text
    assert time.monotonic() - begin < 45  # --heartbeat_timeout=10 and what it takes to end
    processes[1].communicate()


SLOW = """
import sys, time
from cfprm_jax.config import DistributedConfig
from cfprm_jax.runtime import distributed

port, index = sys.argv[1:]
config = DistributedConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=int(index), wait_timeout=1)
with distributed.session(config, "cpu") as processes:
    processes.barrier()
    processes.share(lambda: time.sleep(60))
"""


def start_pair(tiny, script: str, *arguments: str, devices: int = 1) -> list[subprocess.Popen]:
    """Two processes of a script that takes the coordinator's port and its own index."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, port, str(i), *arguments],
            env=tiny.environment(devices),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def test_one_that_lives_but_is_not_done_is_not_waited_for_for_ever(tiny) -> None:
    (status, text), (other_status, _) = (ended(process, 150) for process in start_pair(tiny, SLOW))
    assert (status, other_status) == (2, 2)
    assert "error: process 1 of 2: waited for process 0 for --wait_timeout=1 seconds, and it is not done" in text


def test_a_process_that_waits_for_the_others_to_come_ends_by_a_signal(tiny) -> None:
    given = [*tiny.arguments("lonely"), f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2", "--process_id=1"]
    process = tiny.start([*given, "--preemption_exit_code=75"])
    time.sleep(8)  # what it takes to come to that
    process.send_signal(signal.SIGTERM)
    status, text = ended(process, 60)
    assert status == 75
    assert "Traceback" not in text


RESTORE = """
import sys
import jax, numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from cfprm_jax.config import DistributedConfig
from cfprm_jax.runtime import distributed
from cfprm_jax.checkpoints.saving import Checkpoints

port, index, run, out = sys.argv[1:]
config = DistributedConfig(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=int(index))
with distributed.session(config, "cpu") as processes:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    assert mesh.size == 4

    def abstract(x):
        split = ["all" if size % 4 == 0 else None for size in x.shape[:1]]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*split)))

    with ocp.StandardCheckpointer() as reader:
        stored = reader.metadata(f"{run}/checkpoints/1/state").item_metadata.tree
    restored = Checkpoints(run, keep=2, processes=processes).restore_newest(jax.tree.map(abstract, stored))
    flat = ocp.tree.to_flat_dict(restored.state, sep="/")
    whole = {name: multihost_utils.process_allgather(leaf, tiled=True) for name, leaf in flat.items()}
    if processes.first:
        np.savez(out, **whole)
"""


def test_a_checkpoint_of_eight_devices_in_two_processes(setup, batch, tiny, tmp_path) -> None:
    """Bit-equal; tests/checkpoints/test_saving.py has the meshes of one process."""
    s = setup("data=2,fsdp=2,tensor=2", 8)
    state, _ = s.step(s.init(), s.put(batch()))
    checkpoints = saving.Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {"next": 1}, {})
    checkpoints.close()
    out = tmp_path / "restored.npz"
    for process in start_pair(tiny, RESTORE, str(tmp_path), str(out), devices=2):
        finish(process)
    import orbax.checkpoint as ocp

    expected = ocp.tree.to_flat_dict(state, sep="/")
    with np.load(out) as restored:
        assert set(restored) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(restored[name], value)
    assert isinstance(state, step.TrainState)
