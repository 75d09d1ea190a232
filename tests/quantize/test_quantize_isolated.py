"""The environment apart, with a stand-in for uv: made once, anew after a kill, and one sentence when there is no index."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalq.errors import MeasurementError
from evalq.quantize import isolated

# Acts as uv: "venv" makes a folder with a python in it, "pip" notes its arguments and does what $ACT says.
UV = """#!/bin/sh
set -eu
echo "$@" >> "$NOTES"
if [ "$1" = venv ]; then
  for last in "$@"; do :; done
  mkdir -p "$last/bin"; ln -s "$REAL" "$last/bin/python"; exit 0
fi
case "$ACT" in
  ok) echo "Installed 58 packages" ;;
  hang) sleep 60 ;;
  offline) echo "error: Failed to fetch: https://index/simple/llmcompressor/" >&2; exit 2 ;;
  broken) echo "error: the wheel is broken" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in; its notes are in `notes`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").write_text(UV)
    (folder / "uv").chmod(0o755)
    for name, value in {"NOTES": folder / "notes", "REAL": sys.executable, "ACT": "ok"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(isolated, "NEEDED_BYTES", 1000)
    monkeypatch.setattr(isolated, "pip_settings", dict)
    monkeypatch.setattr(os, "sync", lambda: None)
    return folder


def calls(uv: Path) -> list[str]:
    notes = uv / "notes"
    return notes.read_text().splitlines() if notes.is_file() else []


def test_made_once_and_then_found(uv: Path, tmp_path: Path) -> None:
    told: list[str] = []
    root = tmp_path / "environments"
    python = isolated.isolated_python(root, lambda done, total, stage: told.append(stage))
    assert python.exists()
    assert isolated.isolated_python(root) == python
    assert [call.split()[0] for call in calls(uv)] == ["venv", "pip"]
    assert f"--constraint {isolated.constraints_file()}" in calls(uv)[1]
    assert "packages: Installed 58 packages" in told


def test_other_constraints_are_another_environment(uv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = isolated.isolated_python(tmp_path / "e")
    other = tmp_path / "calibrate.txt"
    other.write_text("llmcompressor==0.99\n")
    monkeypatch.setattr(isolated, "constraints_file", lambda: other)
    assert isolated.isolated_python(tmp_path / "e") != first
    assert len(calls(uv)) == 4


@pytest.mark.parametrize(
    ("act", "said"), [("offline", "no package index gave its packages"), ("broken", "the wheel is broken")]
)
def test_failures_are_one_sentence_and_leave_nothing(
    uv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, said: str
) -> None:
    monkeypatch.setenv("ACT", act)
    with pytest.raises(MeasurementError, match=said) as caught:
        isolated.isolated_python(tmp_path / "e")
    assert (caught.value.exit_code, caught.value.kind) == (5, "environment")
    assert "\n" not in str(caught.value)
    assert [file.name for file in (tmp_path / "e").iterdir() if not file.name.endswith(".lock")] == []
    monkeypatch.setenv("ACT", "ok")
    assert isolated.isolated_python(tmp_path / "e").exists()


def test_killed_half_way_is_made_anew(uv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "e"
    program = (
        "import sys, pathlib; from evalq.quantize import isolated as i; i.NEEDED_BYTES = 1000; i.pip_settings = dict; "
        "i.isolated_python(pathlib.Path(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        env={**os.environ, "ACT": "hang", "PYTHONPATH": str(Path(isolated.__file__).parents[2])},
    )
    deadline = time.monotonic() + 30
    while len(calls(uv)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    half = [file for file in root.iterdir() if file.name.endswith(".tmp")]
    assert len(half) == 1
    assert isolated.isolated_python(root).exists()
    assert not half[0].exists()


def test_an_environment_without_its_python_is_made_anew(uv: Path, tmp_path: Path) -> None:
    python = isolated.isolated_python(tmp_path / "e")
    python.unlink()
    assert isolated.isolated_python(tmp_path / "e").exists()
    assert len(calls(uv)) == 4


def test_pip_settings_reach_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    given = {
        "index-url": "https://a/simple",
        "find-links": "/wheels /more",
        "extra-index-url": "https://b",
        "no-index": "1",
    }
    told = " ".join(isolated.uv_options(given))
    assert told == (
        "--no-index --default-index https://a/simple --find-links /wheels --find-links /more "
        "--index-strategy unsafe-best-match --index https://b"
    )
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own")
    assert "https://a/simple" not in isolated.uv_options(given)
    assert isolated.uv_options({}) == []


def test_the_installer_is_given_the_certificate_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert isolated.uv_environment({"cert": "/etc/proxy.pem"})["SSL_CERT_FILE"] == "/etc/proxy.pem"
    assert "SSL_CERT_FILE" not in isolated.uv_environment({})
    monkeypatch.setenv("SSL_CERT_FILE", "/own.pem")
    assert isolated.uv_environment({"cert": "/etc/proxy.pem"})["SSL_CERT_FILE"] == "/own.pem"
