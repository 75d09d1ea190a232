"""The layers: imports go down only, and the light part works where no heavy package is installed."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("vllm", "torch", "mlflow", "lm_eval", "datasets", "transformers", "pandas", "hydra", "omegaconf")
LIGHT = ("config", "errors", "records", "facts", "plan", "judge", "report", "report.page", "study")


def modules_of(package: str) -> list[str]:
    path = ROOT / "evalq" / package.replace(".", "/")
    if not path.is_dir():
        return [f"evalq.{package}"]
    return [f"evalq.{package}", *(f"evalq.{package}.{file.stem}" for file in sorted(path.glob("[a-z]*.py")))]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_go_down_only() -> None:
    command = shutil.which("lint-imports") or str(Path(sys.executable).parent / "lint-imports")
    if not Path(command).exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("absent", [False, True])
def test_light_part_needs_no_heavy_package(absent: bool) -> None:
    """Neither loaded where they are installed, nor missed where they are not."""
    light = [module for package in LIGHT for module in modules_of(package)]
    code = f"import sys, importlib\nheavy = {HEAVY!r}\n"
    if absent:
        code += "sys.modules.update(dict.fromkeys(heavy))\n"  # None there makes every import of them fail
    code += f"for name in {light!r}: importlib.import_module(name)\n"
    code += "print([name for name in heavy if sys.modules.get(name)])"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("verb", ["plan", "gate", "compare", "explain", "report", "inspect"])
def test_light_verbs_show_their_help_without_heavy_packages(verb: str) -> None:
    heavy = [name for name in HEAVY if name not in ("hydra", "omegaconf")]
    code = f"import sys\nsys.modules.update(dict.fromkeys({heavy!r}))\nfrom evalq.cli import main\n"
    code += f"try: code = main([{verb!r}, '--help'])\nexcept SystemExit as end: code = end.code\nassert not code, code"
    assert verb in run_python(code)


@pytest.mark.parametrize(
    "module", ["evalq.app", "evalq.sweep", "evalq.pipeline", "evalq.measure.launch", "evalq.cli.run"]
)
def test_parent_process_loads_no_engine(module: str) -> None:
    """The parent of the workers stays small: what it imports is not in the engine's way."""
    loaded = run_python(f"import sys, {module}\nprint([n for n in {HEAVY[:-2]!r} if n in sys.modules])")
    assert loaded.strip() == "[]"


def test_engine_and_harness_are_imported_in_one_place_each() -> None:
    engine = {"measure/engine.py", "measure/probe.py", "measure/environment.py", "measure/load_client.py"}
    owners = {"vllm": engine, "lm_eval": {"measure/tasks.py"}}
    found: dict[str, set[str]] = {name: set() for name in owners}
    for file in (ROOT / "evalq").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                if name.split(".")[0] in owners:
                    found[name.split(".")[0]].add(str(file.relative_to(ROOT / "evalq")))
    assert all(found[name] <= owners[name] for name in owners), found
