"""launch/: scripts that a linter and a stand-in Slurm run, and Kubernetes objects checked field by field."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys

import pytest
import yaml
from tiny_runs import ROOT, rows

from cfprm_jax import flags, score, train
from cfprm_jax.config import DistributedConfig
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.runtime import distributed

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


def test_there_is_a_file_a_place() -> None:
    assert {path.name for path in LAUNCH.iterdir()} >= {
        "Dockerfile",
        "gpu_environment.sh",
        "kubernetes.yaml",
        "kubernetes_shards.yaml",
        "slurm.sh",
        "slurm_array.sh",
        "tpu_vm.sh",
        "workstation.sh",
    }
    for script in ("workstation.sh", "slurm.sh", "slurm_array.sh", "tpu_vm.sh"):
        assert os.access(LAUNCH / script, os.X_OK)


def test_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def executable(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_xla_accepts_the_flags() -> None:
    """XLA ends a process that is given a flag that it does not know."""
    script = f'source "{LAUNCH}/gpu_environment.sh" && exec "{sys.executable}" -c "import jax; print(jax.devices())"'
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    run = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("CpuDevice") == 3  # what was set already still holds
    exported = dict(re.findall(r"(\w+)=\"\$\{\1:-([^}]+)\}\"", (LAUNCH / "gpu_environment.sh").read_text()))
    assert exported == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "JAX_OPTIMIZATION_LEVEL": "O1"}


@pytest.mark.parametrize("script", ["workstation.sh", "slurm.sh", "tpu_vm.sh"])
def test_the_same_flag_file_works_in_each(script: str, tmp_path) -> None:
    """What a launcher runs, taken down by a stand-in python; flags given by hand come last."""
    executable(tmp_path / "python", f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    executable(tmp_path / "srun", '#!/bin/sh\nwhile [ "$1" != python ]; do shift; done\nexec "$@"\n')
    flagfile = "--flagfile=configs/paper/math_q_ranking_c2.flags"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT)}
    environment |= {"SLURM_GPUS_ON_NODE": "8"}
    subprocess.run(["bash", LAUNCH / script, flagfile, "--seed=3"], cwd=ROOT, env=environment, check=True)
    module, command, *given = (tmp_path / "given").read_text().splitlines()
    assert (module, command) == ("-m", "cfprm_jax.train")
    assert given[-2:] == [flagfile, "--seed=3"]
    config = flags.parse(train.TrainConfig, ["train", *(g.replace("=configs", f"={ROOT}/configs") for g in given)])
    assert config.run.seed == 3
    assert config.run.resume == "auto"
    assert config.granularity.c_max == 2
    assert config.device.platform == ("tpu" if script == "tpu_vm.sh" else "gpu")
    assert config.device.mesh == ("data=-1,fsdp=8,tensor=1" if script == "slurm.sh" else "data=1,fsdp=-1,tensor=1")


SRUN = """#!/usr/bin/env bash
# Stands in for srun: two tasks on this machine, with the variables of a step, each one's signal passed on.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
trap 'kill -TERM $first $second' TERM
highest=0
for task in $first $second; do
  while true; do
    status=0; wait "$task" || status=$?
    kill -0 "$task" 2>/dev/null || break
  done
  ((status > highest)) && highest=$status
done
exit $highest
"""


def test_slurm_trains_with_two_real_processes(tiny, tmp_path) -> None:
    executable(tmp_path / "srun", SRUN)
    executable(tmp_path / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    environment = tiny.environment() | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),  # gives the port
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    given = tiny.arguments("slurm", max_steps=6, eval_every=3)
    run = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", *given, "--platform=cpu", f"--compile_cache_dir={tiny.compiled}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 x cpu (cpu) in 2 processes, mesh data=2, fsdp=1, tensor=1" in run.stdout
    assert run.stdout.count("done        6 steps") == 1  # only the first prints
    directory = tiny.directory / "slurm"
    assert [row["step"] for row in rows(directory)] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert loaded_prm.load_for_inference(directory).meta["step"] == 6


@pytest.mark.parametrize(("status", "ends", "requeued"), [(0, 0, False), (75, 0, True), (2, 2, False)])
def test_slurm_requeues_a_run_that_was_stopped(tmp_path, status: int, ends: int, requeued: bool) -> None:
    executable(tmp_path / "srun", f"#!/bin/sh\nexit {status}\n")
    executable(tmp_path / "scontrol", f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CFPRM_HOME": str(ROOT)}
    environment |= {"SLURM_JOB_ID": "77", "CFPRM_REQUEUE": "1"}
    assert subprocess.run(["bash", LAUNCH / "slurm.sh"], env=environment).returncode == ends
    assert (tmp_path / "arguments").exists() == requeued
    if requeued:
        assert (tmp_path / "arguments").read_text() == "requeue 77\n"


# The fields of the objects that the file uses, with their types. "!" is required; a list holds the type of its items.
# Names and types are those of JobSet's own custom resource definition (kubernetes-sigs/jobset, Apache-2.0,
# config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml at 08dfbdf of August 2026, Job and Pod inside), by
# which the whole file was checked once; choices of a string, and more that is required, are from the API reference of
# Kubernetes 1.31, whose server checks them.
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+(\.\d*)?|\.\d+))?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
CONTAINER = {
    "name!": NAME,
    "image!": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "ports": [{"containerPort!": int, "name": str}],
    "resources": {"limits": {"nvidia.com/gpu": QUANTITY}, "requests": {"cpu": QUANTITY, "memory": QUANTITY}},
    "volumeMounts": [{"name!": NAME, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": NAME,
    "persistentVolumeClaim": {"claimName!": NAME, "readOnly": bool},
    "emptyDir": {"medium": re.compile("Memory|"), "sizeLimit": QUANTITY},
}
POD = {
    "restartPolicy": re.compile("Always|OnFailure|Never"),
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {},
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}
RULE = {
    "action!": re.compile("FailJob|FailIndex|Ignore|Count"),
    "onExitCodes": {"containerName": NAME, "operator!": re.compile("In|NotIn"), "values!": [int]},
    "onPodConditions": [{"type!": str, "status": re.compile("True|False|Unknown")}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": re.compile("Indexed|NonIndexed"),
    "backoffLimit": int,
    "podFailurePolicy": {"rules!": [RULE]},
    "template!": {"metadata": {}, "spec!": POD},
}
JOB_SET = {
    "apiVersion!": re.compile(r"jobset\.x-k8s\.io/v1alpha2"),
    "kind!": re.compile("JobSet"),
    "metadata!": {"name!": NAME, "namespace": NAME},
    "spec!": {
        "failurePolicy": {"maxRestarts": int},
        "network": {"enableDNSHostnames": bool, "subdomain": NAME},
        "replicatedJobs!": [{"name!": NAME, "replicas": int, "template!": {"metadata": {}, "spec!": JOB}}],
    },
}


def faults(value, schema, where: str = "") -> list[str]:
    """What of a value its schema does not allow."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: expected fields, found {value!r}"]
        allowed = {name.rstrip("!"): kind for name, kind in schema.items()}
        missing = [name.rstrip("!") for name in schema if name.endswith("!") and name.rstrip("!") not in value]
        found = [f"{where}.{name}: missing" for name in missing]
        for name, inner in value.items():
            found += (
                faults(inner, allowed[name], f"{where}.{name}") if name in allowed else [f"{where}.{name}: unknown"]
            )
        return found
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: expected a list, found {value!r}"]
        return [fault for i, inner in enumerate(value) for fault in faults(inner, schema[0], f"{where}[{i}]")]
    fits = type(value) is schema if isinstance(schema, type) else schema.fullmatch(str(value))
    return [] if fits else [f"{where}: {value!r} is not {schema}"]


@pytest.fixture
def job_set() -> dict:
    return yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())


def test_kubernetes_accepts_it(job_set) -> None:
    assert faults(job_set, JOB_SET) == []
    container = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "A", "value": 3})  # the commonest mistake
    container["arg"] = container.pop("image")
    assert len(faults(job_set, JOB_SET)) == 3


def test_kubernetes_parts_fit_each_other_and_the_command(job_set) -> None:
    (group,) = job_set["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    # The processes find each other.
    name = f"{job_set['metadata']['name']}-{group['name']}-0-0.{job_set['metadata']['name']}"
    port = container["ports"][0]["containerPort"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"] == 2
    layout = distributed.detect(DistributedConfig(), {**environment, "JOB_COMPLETION_INDEX": "1"})
    assert layout == (f"{name}:{port}", job["completions"], 1, None)
    # A stopped run is no failure and starts again; podFailurePolicy is for pods that are not restarted in place.
    arguments = [a.replace("/opt/cfprm_jax", str(ROOT)) for a in container["args"]]
    config = flags.parse(train.TrainConfig, ["train", *arguments])
    stopped, disrupted = job["podFailurePolicy"]["rules"]
    assert stopped["onExitCodes"]["values"] == [config.run.preemption_exit_code] != [0]
    assert stopped["onExitCodes"]["containerName"] == container["name"]
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"Ignore"}
    assert pod["restartPolicy"] == "Never"
    assert config.run.resume == "auto"
    assert container["command"] == ["python", "-m", "cfprm_jax.train"]
    # All GPUs of a pod hold one copy of the weights.
    assert f"fsdp={container['resources']['limits']['nvidia.com/gpu']}," in config.device.mesh
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # The flags of XLA are those of the scripts.
    script = (LAUNCH / "gpu_environment.sh").read_text()
    (size,) = re.findall(r"message_bytes=(\d+)", script)
    names = re.findall(r"(--xla\w+)=\$message_bytes", script)
    assert environment["XLA_FLAGS"].split() == [f"{flag}={size}" for flag in names]
    for variable in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_OPTIMIZATION_LEVEL"):
        assert f'{variable}="${{{variable}:-{environment[variable]}}}"' in script


@pytest.mark.parametrize(("environment", "shard"), [({}, "3/8"), ({"CFPRM_SHARDS": "12"}, "3/12")])
def test_a_task_of_an_array_scores_its_share(environment, shard, tmp_path) -> None:
    executable(tmp_path / "python", f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_MAX": "7",
        **environment,
    }
    given = ["score", "--checkpoint=RUN", "--input=a.jsonl", "--output=b.jsonl"]
    subprocess.run(["bash", LAUNCH / "slurm_array.sh", *given], cwd=ROOT, env=environment, check=True)
    module, command, *found = (tmp_path / "given").read_text().splitlines()
    assert (module, command) == ("-m", "cfprm_jax.score")
    config = flags.parse(score.ScoreConfig, ["score", *found])
    assert (config.shard, config.resume, config.output) == (shard, "auto", "b.jsonl")


def test_a_pod_of_the_indexed_job_scores_its_share(tmp_path) -> None:
    job = yaml.safe_load((LAUNCH / "kubernetes_shards.yaml").read_text())
    assert job["kind"] == "Job" and job["spec"]["completionMode"] == "Indexed"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    executable(tmp_path / "python", f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "5"}
    subprocess.run([*container["command"], *container["args"]], env=environment, check=True)
    config = flags.parse(score.ScoreConfig, ["score", *(tmp_path / "given").read_text().splitlines()[2:]])
    assert config.shard == f"5/{job['spec']['completions']}" and config.resume == "auto"
