"""An environment apart for llm-compressor, whose pins differ from the engine's: made on first use, whole or not at all.

It lies under paths.root/environments, named by the constraint file and the Python that runs it. uv makes it where there is
one (on the path, or where the Makefile puts it), else venv and pip. Indexes and find-links are those that pip is set to.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from evalq.errors import ConfigError, MeasurementError
from evalq.quantize.hashing import text_sha256
from evalq.quantize.store import Progress, locked, new_folder
from evalq.records import write_text

REQUIREMENTS = ("llmcompressor", "auto-round", "torch")
MARKER_FILE = "evalq_environment.json"
NEEDED_BYTES = 1_500_000_000  # with the CPU build of torch; a CUDA build takes 5 GB
NO_INDEX = re.compile(
    r"failed to fetch|could not connect|error sending request|dns error|connection refused|no matching distribution|"
    r"newconnectionerror|not found in the (package registry|provided package locations)|network (is unreachable|connectivity)|"
    r"timed out|no-index|offline|could not find a version|no solution found|resolutionimpossible|tunnel|proxy",
    re.IGNORECASE,
)


def constraints_file() -> Path:
    """constraints/calibrate.txt, inside the installed package or beside it in a source tree. Errors: ConfigError."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "constraints", package.parent / "constraints"):
        if (folder / "calibrate.txt").is_file():
            return folder / "calibrate.txt"
    raise ConfigError(f"no constraints/calibrate.txt in {package} or beside it; install evalq again")


def environment_key() -> str:
    """Equal key = the same packages on the same Python."""
    python = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()} {sys.platform}"
    return text_sha256(json.dumps([constraints_file().read_text(encoding="utf-8"), REQUIREMENTS, python]))


def python_of(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def isolated_python(root: Path, progress: Progress | None = None) -> Path:
    """The environment's Python, made first when it is not there.

    Errors: MeasurementError(environment) when it cannot be made, (disk) when there is no room.
    """
    key = environment_key()
    target = root / f"calibrate-{key[:16]}"
    if _whole(target, key):
        return python_of(target)
    with locked(target, progress):
        if not _whole(target, key):
            with new_folder(target, NEEDED_BYTES) as folder:
                _install(folder, target, progress)
                os.sync()  # tens of thousands of small files: one flush of the system is cheaper than as many of theirs
                write_text(folder / MARKER_FILE, json.dumps({"key": key, "python": sys.version}) + "\n")
    return python_of(target)


def _whole(target: Path, key: str) -> bool:
    try:
        marker = json.loads((target / MARKER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("key") == key and python_of(target).exists()


def _install(folder: Path, target: Path, progress: Progress | None) -> None:
    """Make folder/venv and put the packages there. The folder is renamed later, so only its Python is used."""
    uv, venv = find_uv(), folder / "venv"
    settings = pip_settings()
    packages = ["--constraint", str(constraints_file()), *REQUIREMENTS]
    if uv is not None:
        make = [uv, "venv", "--relocatable", "--python", sys.executable, str(venv)]
        add = [uv, "pip", "install", "--python", str(python_of(folder)), *uv_options(settings), *packages]
    else:
        make = [sys.executable, "-m", "venv", str(venv)]
        add = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", *packages]
    for command, label in (
        (make, "making the environment for calibrated methods"),
        (add, "fetching llm-compressor and its packages (once, 1.2 GB or more)"),
    ):
        if progress is not None:
            progress(0, 1, label)
        code, lines = _run(command, progress, uv_environment(settings))
        if code != 0:
            raise _cannot_make(lines, target)


def find_uv() -> str | None:
    """uv on the path, or the one that the Makefile installs beside the packages."""
    beside = Path(sys.prefix) / "uv" / "bin" / "uv"
    return shutil.which("uv") or (str(beside) if beside.is_file() else None)


def pip_settings() -> dict[str, str]:
    """pip's own settings (files and PIP_ variables) by bare name, e.g. {"index-url": ...}; empty without pip."""
    settings: dict[str, str] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=True
        )
        for line in answer.stdout.splitlines():
            name, _, value = line.partition("=")
            with contextlib.suppress(ValueError, SyntaxError):
                settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def uv_options(settings: dict[str, str]) -> list[str]:
    """What uv must be told of pip's settings, which it does not read; its own variables win."""
    options: list[str] = []
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    if "index-url" in settings and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(os.environ):
        options += ["--default-index", settings["index-url"]]
    if "UV_FIND_LINKS" not in os.environ:
        options += [part for link in settings.get("find-links", "").split() for part in ("--find-links", link)]
    extra = [] if {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & set(os.environ) else settings.get("extra-index-url", "").split()
    if extra:
        # pip takes the best version of all indexes; uv by itself stops at the first index that has the package.
        options += ["--index-strategy", "unsafe-best-match", *(part for url in extra for part in ("--index", url))]
    return options


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """The environment of the installer: pip's certificate for uv too, which does not read it; its own variable wins."""
    found = dict(os.environ)
    if settings.get("cert"):
        found.setdefault("SSL_CERT_FILE", settings["cert"])
    return found


def _run(command: Sequence[str], progress: Progress | None, env: dict[str, str]) -> tuple[int, list[str]]:
    """Run a program, telling its lines as progress; it dies with this process. Returns exit code and its last lines."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
        env=env,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip():
                lines = [*lines[-40:], line.strip()]
                if progress is not None:
                    progress(0, 1, f"packages: {line.strip()[:70]}")
        return process.wait(), lines
    finally:
        end_group(process)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a process of its own session with all of its children, when it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cannot_make(lines: list[str], target: Path) -> MeasurementError:
    text = " ".join(lines)
    telling = [line for line in lines if re.search(r"error|fail|no solution|because|refused", line, re.IGNORECASE)]
    what = (telling or lines or ["no output"])[0].lstrip("×╰─▶ ")[:200]
    if NO_INDEX.search(text):
        return MeasurementError(
            f"the environment for calibrated methods cannot be made because no package index gave its packages ({what}): "
            f"connect once, set pip's index-url or find-links, or copy {target} from a machine with the same Python; "
            "quant.method=rtn needs none of it",
            "environment",
        )
    return MeasurementError(
        f"the environment for calibrated methods cannot be made ({what}): correct what it names and run the same command "
        "again; quant.method=rtn needs none of it",
        "environment",
    )
