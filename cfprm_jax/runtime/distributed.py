"""Multi-process runs: initialization, agreement between the processes, and a common end.

The processes are configured by flags, by the environment of a launcher, or by JAX itself on a TPU. Small values (which
checkpoint to resume from, why a process failed) go through the key-value store of JAX's coordination service, which
runs in process 0; everything else is a collective of the partitioner.

Several processes add two failure modes. One process fails while the others wait for it in a collective, for ever: so
the reason is put into the store, each process polls it every second, and all of them end. Or a signal reaches one
process, or all at different steps, and they would save different steps: so the processes vote on the signal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.config import DistributedConfig
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import devices, process

_STORE = "cfprm_jax"
_FAILURE, _ENDED = f"{_STORE}/failure", f"{_STORE}/ended/"
# Seconds between polls for another process's failure, and how long process 0, which holds the store, waits until the
# others have read the reason.
_LOOK_EVERY, _LINGER = 1.0, 10.0
# The coordinator's default ports: below Linux's range of ephemeral ports.
_FIRST_PORT, _PORTS = 20000, 10000


class Layout(NamedTuple):
    """The arguments of jax.distributed.initialize."""

    coordinator: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None  # GPUs of this process among those it sees; None is all of them


def detect(config: DistributedConfig, environ: Mapping[str, str]) -> Layout | None:
    """The layout from flags or the environment; None for a single process.

    In this order: --coordinator, --num_processes and --process_id; JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES with
    JAX_PROCESS_ID or, in a Kubernetes indexed Job, JOB_COMPLETION_INDEX; the variables of a Slurm step.

    Raises:
      UserError: some of the settings are missing, or they contradict each other.
    """
    if config.distributed == "off":
        return None
    given = {
        "--coordinator": config.coordinator,
        "--num_processes": config.num_processes or "",
        "--process_id": config.process_id if config.process_id >= 0 else "",
    }
    if any(value != "" for value in given.values()):
        return _checked(given, given)
    if environ.get("JAX_COORDINATOR_ADDRESS") or environ.get("JAX_NUM_PROCESSES"):
        index = "JAX_PROCESS_ID" if "JAX_PROCESS_ID" in environ else "JOB_COMPLETION_INDEX"
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", index)
        return _checked({name: environ.get(name, "") for name in names}, names)
    return _slurm(environ)


def _checked(values: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> Layout | None:
    coordinator, number, index = (str(values[name]) for name in names)
    missing = [name for name in names if values[name] == ""]
    if missing:
        raise UserError(f"several processes need {', '.join(names)}; missing: {', '.join(missing)}")
    settings = ", ".join(f"{name}={values[name]}" for name in names)
    if not (number.isascii() and number.isdigit() and index.isascii() and index.isdigit() and int(index) < int(number)):
        raise UserError(f"{settings}: expected a number of processes, and an index below it")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"{settings}: expected the coordinator as HOST:PORT, on the machine of process 0")
    return Layout(coordinator, int(number), int(index), None) if int(number) > 1 else None


def _slurm(environ: Mapping[str, str]) -> Layout | None:
    """The layout of a Slurm step. An allocation without srun has no step, and is one process."""
    number = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if number == 1 or "SLURM_PROCID" not in environ or "SLURM_STEP_NODELIST" not in environ:
        return None
    # Two steps of one job must not take one port.
    port = _FIRST_PORT + (int(environ["SLURM_JOB_ID"]) * 7 + int(environ.get("SLURM_STEP_ID", "0"))) % _PORTS
    coordinator = f"{first_host(environ['SLURM_STEP_NODELIST'])}:{environ.get('JAX_COORDINATOR_PORT', port)}"
    beside = tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), int(environ.get("SLURM_NODEID", "0")))
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    # One process a GPU: each takes its own among those that all of them see. Where Slurm shows each process its own
    # only (--gpus-per-task), or one process has the node, it takes what it sees.
    own = (int(environ["SLURM_LOCALID"]),) if beside > 1 and len(visible) > 1 else None
    return Layout(coordinator, number, int(environ["SLURM_PROCID"]), own)


def first_host(nodes: str) -> str:
    """ "node[003-010,12],other" -> "node003": the first of a Slurm node list, where process 0 runs."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodes!r} names no node")
    return "".join(part or "" for part in match.groups())


def tasks_on_node(counts: str, node: int) -> int:
    """ "8(x2),4" (SLURM_STEP_TASKS_PER_NODE) and node 2 -> 4."""
    numbers: list[int] = []
    for number, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        numbers += [int(number)] * int(repeats or 1)
    return numbers[node] if node < len(numbers) else 1


class Processes:
    """The processes of a run. All processes must call the methods in the same order.

    Attributes:
      index: index of this process.
      count: number of processes.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Any = None, wait_timeout: int = 0) -> None:
        """A single process by default.

        Args:
          store: the client of JAX's coordination service.
          wait_timeout: --wait_timeout.
        """
        self.index, self.count = index, count
        self._store, self._calls, self._wait_timeout = store, 0, wait_timeout
        self._ending = threading.Lock()  # held to the end by the thread that ends the process

    @property
    def first(self) -> bool:
        """Whether this is the main process, which prints and writes."""
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """All-gather: the value of each process, in order, on all of them. Any JSON value."""
        if self.count == 1:
            return [value]
        self._calls += 1
        key = f"{_STORE}/call/{self._calls}"
        self._store.key_value_set(f"{key}/{self.index}", json.dumps(value))
        return [self._wait_for(f"{key}/{i}", i) for i in range(self.count)]

    def share(self, value: Callable[[], Any]) -> Any:
        """Broadcast: the result of value() in the main process, on all of them, which wait for it."""
        if self.count == 1:
            return value()
        self._calls += 1
        key = f"{_STORE}/call/{self._calls}"
        if self.first:
            self._store.key_value_set(key, json.dumps(value()))
        return self._wait_for(key, 0)

    def barrier(self) -> None:
        """Wait until all processes have called it."""
        self.gather(None)

    def _wait_for(self, key: str, index: int) -> Any:
        """The value that another process puts into the store. If that process fails meanwhile, this one ends."""
        try:
            return json.loads(self._store.blocking_key_value_get(key, self._wait_timeout * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise UserError(
                f"waited for process {index} for --wait_timeout={self._wait_timeout} seconds, and it is not done"
            ) from error

    @contextlib.contextmanager
    def one_after_the_first(self) -> Iterator[None]:
        """Run the block in the main process, then in the others, which find its files. No other method inside."""
        if not self.first:
            self.barrier()
        yield
        if self.first:
            self.barrier()

    def require_equal(self, what: str, value: dict[str, Any]) -> None:
        """UserError, naming the keys in question, unless every process has the same dictionary."""
        first, *others = self.gather(value)
        for i, other in enumerate(others, 1):
            odd = [key for key in {**first, **other} if first.get(key) != other.get(key)]
            if odd:
                named = ", ".join(f"{key} is {other.get(key)!r} in process {i}, {first.get(key)!r} in 0" for key in odd)
                raise UserError(
                    f"{what} differs between the processes: {named}; all need the same flags, files and versions"
                )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """With several processes, an exception ends all of them, with its reason, instead of leaving the block.

        Enter it inside any context manager that waits for the other processes on exit, such as for a checkpoint.
        """
        if self.count == 1:
            yield
            return
        try:
            yield
        except UserError as error:
            self.fail(str(error), 2)
        except OSError as error:
            self.fail(_one_line(error), 2)
        except KeyboardInterrupt:
            self.fail("interrupted", 130)
        except BaseException as error:
            # An unexpected error: the whole traceback, unless it only follows from another process's end.
            if self._failure() is None:
                traceback.print_exc()
            self.fail(f"{type(error).__name__}: {_one_line(error)}", 1)

    def fail(self, reason: str, status: int) -> NoReturn:
        """End all processes with the reason of this one's failure; the first reason counts."""
        self._end_all(f"error: process {self.index} of {self.count}: {reason}", status, print_on_all=True)

    def stop(self, line: str, status: int) -> NoReturn:
        """End all processes after a signal; the main process prints the line."""
        self._end_all(line, status, print_on_all=False)

    def _end_all(self, line: str, status: int, *, print_on_all: bool) -> NoReturn:
        self._ending.acquire()
        prints = print_on_all or self.first
        if self.count > 1:
            try:
                self._store.key_value_set(_FAILURE, json.dumps([line, status]))
            except Exception as error:  # the reason is already there, or the store is not
                known = self._failure()
                if known is None:
                    line, prints = f"{line} (and process 0 is gone: {_one_line(error)})", True
                else:
                    (line, status), prints = known, self.first
        self._end(line if prints else "", status)

    def watch(self, stop: threading.Event) -> None:
        """Poll for another process's failure until stop is set, and then end this one. Runs in a thread."""
        while not stop.wait(_LOOK_EVERY):
            if (failure := self._failure()) is not None and not stop.is_set():
                self._ending.acquire()
                self._end(failure[0] if self.first else "", failure[1])

    def _failure(self) -> tuple[str, int] | None:
        try:
            line, status = json.loads(self._store.key_value_try_get(_FAILURE))
        except Exception:  # not there yet, or the store is gone, which JAX itself notices
            return None
        return line, status

    def _end(self, line: str, status: int) -> NoReturn:
        """Exit without waiting for threads, collectives or other processes, which may never return."""
        if line:
            newline = "\n" if sys.stdout.isatty() else ""  # an updating line may stand there
            # Not by print: a signal's handler may come while this thread is printing.
            process.write_last_line(f"{newline}{line}")
        with contextlib.suppress(Exception):
            self._store.key_value_set(f"{_ENDED}{self.index}", "")
            deadline = time.monotonic() + _LINGER
            while self.first and time.monotonic() < deadline:
                if len(self._store.key_value_dir_get(_ENDED)) == self.count:
                    break
                time.sleep(0.05)
        os._exit(status)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _tpu_here() -> bool:
    return any(pathlib.Path("/dev").glob("accel[0-9]*")) or any(pathlib.Path("/dev/vfio").glob("[0-9]*"))


@contextlib.contextmanager
def session(config: DistributedConfig, platform: str) -> Iterator[Processes]:
    """Initialize the processes of this run; must be entered before JAX initialises its devices.

    In a single process exceptions propagate; with several they end all processes, as in Processes.guard.

    Args:
      platform: --platform. On a TPU, JAX detects the processes itself.

    Raises:
      UserError: the other processes did not join within --initialization_timeout.
    """
    layout = detect(config, os.environ)
    if layout is not None or (config.distributed == "auto" and platform == "tpu" and _tpu_here()):
        _join(config, layout)
    devices.prepare(platform)
    count = jax.process_count()
    if count == 1:
        yield Processes()
        return
    if not jax.distributed.is_initialized():
        raise UserError(f"JAX has {count} processes, but was not initialised for them: use --platform=tpu on a TPU pod")
    # JAX has no public function for the key-value store; Orbax and others take it from the same place.
    from jax._src import distributed as jax_distributed

    client = jax_distributed.global_state.client
    processes = Processes(jax.process_index(), count, client, config.wait_timeout)
    done = threading.Event()
    threading.Thread(target=processes.watch, args=(done,), daemon=True, name="failure watch").start()
    try:
        with processes.guard():
            yield processes
            processes.barrier()
    finally:
        done.set()
    jax.distributed.shutdown()


def _join(config: DistributedConfig, layout: Layout | None) -> None:
    # Its handler would take SIGTERM, which the loop handles, out of Python's hands.
    jax.config.update("jax_enable_preemption_service", False)
    arguments: dict[str, Any] = {}
    if layout is not None:
        arguments = {
            "coordinator_address": layout.coordinator,
            "num_processes": layout.num_processes,
            "process_id": layout.process_id,
            "local_device_ids": layout.local_device_ids,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=config.initialization_timeout,
            heartbeat_timeout_seconds=config.heartbeat_timeout,
            shutdown_timeout_seconds=config.heartbeat_timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        who = f"process {layout.process_id} of {layout.num_processes}" if layout else "this process"
        where = f"the coordinator {layout.coordinator}" if layout else "the other hosts of the TPU"
        raise UserError(
            f"{who} could not join {where} within --initialization_timeout={config.initialization_timeout} seconds "
            f"({_one_line(error)}); --distributed=off runs one process alone"
        ) from error


class StopVote:
    """Whether any process has received a signal to stop: all processes get the same answer at the same step.

    With several processes the answer is one vote late, so that the host does not wait for its devices: each call
    dispatches the maximum over all processes' signals, and reads the result that the previous call dispatched.
    """

    def __init__(self, own: Callable[[], signal.Signals | None], devices: Sequence[jax.Device], count: int) -> None:
        """A vote.

        Args:
          own: the signal that this process received.
          devices: of all processes.
          count: number of processes.
        """
        self._own, self._alone = own, count == 1
        self._shape = (len(devices),)
        mesh = Mesh(np.asarray(devices), ("all",))
        self._each = NamedSharding(mesh, PartitionSpec("all"))
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: jax.Array | None = None
        self.received: signal.Signals | None = None

    def __call__(self) -> bool:
        """Whether to stop now; once true it stays true."""
        if self._alone:
            self.received = self._own()
        elif self.received is None:
            if self._pending is not None and (number := int(self._pending)):
                self.received = signal.Signals(number)
            else:
                self._pending = self._largest(self._votes(int(self._own() or 0)))
        return self.received is not None

    def _votes(self, number: int) -> jax.Array:
        fill = functools.partial(np.full, (1,), number, np.int32)
        return jax.make_array_from_callback(self._shape, self._each, lambda _: fill())
