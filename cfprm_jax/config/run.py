"""Options of a run: devices, processes, its directory."""

from __future__ import annotations

import dataclasses

from cfprm_jax.config.shared import EVAL_METRICS, LARGEST_SEED, LOGGERS, LONGEST_WAIT, MOST_STEPS
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class DeviceConfig(Options):
    """Devices."""

    platform: str = option(
        "auto", "Accelerator; an error if it is not available.", choices=("auto", "cpu", "gpu", "tpu")
    )
    mesh: str = option(
        "data=-1,fsdp=1,tensor=1", "Device mesh: number of devices along each axis; -1 is all that remain."
    )
    compile_cache_dir: str = option(
        "auto",
        "Directory of JAX's persistent compilation cache. auto is in the user's cache directory; empty disables it.",
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Options):
    """Distributed training.

    launch/ has a script for each environment.
    """

    distributed: str = option(
        "auto",
        "auto joins a distributed run if --coordinator, JAX_COORDINATOR_ADDRESS, Slurm or, with --platform=tpu, a TPU "
        "pod describes one; off runs a single process.",
        choices=("auto", "off"),
    )
    coordinator: str = option(
        "", "Address of process 0, HOST:PORT. Required in every process, with --num_processes and --process_id."
    )
    num_processes: int = option(0, "Number of processes.", lower=0, upper=1 << 16)
    process_id: int = option(-1, "Index of this process, from 0.", lower=-1, upper=(1 << 16) - 1)
    initialization_timeout: int = option(
        300, "Timeout in seconds for all processes to connect at the start.", lower=1, upper=LONGEST_WAIT
    )
    heartbeat_timeout: int = option(
        100,
        "Timeout in seconds after which a process without heartbeat is considered dead, which ends the run.",
        lower=1,
        upper=LONGEST_WAIT,
    )
    wait_timeout: int = option(
        86400,
        "Timeout in seconds for waiting on a live process, such as the main process while it tokenises the corpus.",
        lower=1,
        upper=LONGEST_WAIT,
    )


@dataclasses.dataclass(frozen=True)
class RunConfig(Options):
    """Run directory: checkpoints, logs, resuming."""

    output_dir: str = option("", "Run directory.")
    resume: str = option(
        "never",
        "Whether to resume a run in --output_dir. never: it is an error if there is one. auto: resume it, or start a "
        "new one. always: it is an error if there is none.",
        choices=("never", "auto", "always"),
    )
    seed: int = option(
        0, "Random seed of the data order and of the reward head's initialisation.", lower=0, upper=LARGEST_SEED
    )
    max_steps: int = option(
        0, "Maximum number of optimizer steps; 0 trains to the end of the data.", lower=0, upper=MOST_STEPS
    )
    log_every: int = option(
        10,
        "Optimizer steps between printed lines and between points of --logger; metrics.jsonl has every step.",
        lower=1,
        upper=MOST_STEPS,
    )
    logger: tuple[str, ...] = option(
        ("tensorboard",),
        "Loggers beside metrics.jsonl, comma-separated; empty is none. A logger that fails is dropped, and training "
        "continues.",
        choices=LOGGERS,
        kind="list",
    )
    eval_every: int = option(
        0, "Optimizer steps between evaluations; 0 evaluates at the end only.", lower=0, upper=MOST_STEPS
    )
    checkpoint_every: int = option(
        500, "Optimizer steps between checkpoints; the last step always has one.", lower=1, upper=MOST_STEPS
    )
    keep_checkpoints: int = option(2, "Number of newest checkpoints to keep.", lower=1, upper=10_000)
    keep_best: str = option(
        "none",
        "Held-out metric for keeping the best checkpoint, in OUTPUT_DIR/best, besides the newest. Requires held-out "
        "questions.",
        choices=("none", *EVAL_METRICS),
    )
    preemption_exit_code: int = option(
        0,
        "Exit status after a SIGTERM, once the checkpoint is saved. A nonzero status can make a scheduler restart the "
        "run.",
        lower=0,
        upper=255,
    )
    data_cache_dir: str = option(
        "auto", "Directory of cached tokenised corpora; auto is in the user's cache directory."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data_cache_dir:  # which would be the working directory
            raise UserError("--data_cache_dir is empty: expected a directory, or auto")
