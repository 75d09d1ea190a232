"""Case b8: the hub offline, refusing, rate limiting; each one plain sentence, never a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("torch")

from hub_stub import COMMIT, MODEL, Stub, serving  # noqa: E402 - after importorskip
from tiny_checkpoint import tiny_tensors, write_checkpoint  # noqa: E402

from evalq.config import ModelConfig  # noqa: E402
from evalq.errors import ConfigError, EvalqError, MeasurementError  # noqa: E402
from evalq.quantize import hub, source_checkpoint  # noqa: E402


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    folder = write_checkpoint(tmp_path / "remote", tiny_tensors())
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "run_me.py").write_text("raise SystemExit")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's own back-off too
    with serving(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        yield server


def model(**changes: str) -> ModelConfig:
    return ModelConfig(**{"name": "tiny", "source": "hub", "hub_id": MODEL, "bos": "never", **changes})


def refused(tmp_path: Path, config: ModelConfig) -> EvalqError:
    with pytest.raises(EvalqError) as error:
        source_checkpoint(config, tmp_path / "models")
    assert "\n" not in str(error.value)
    assert "model.path" in str(error.value)
    return error.value


def test_only_safetensors_json_and_tokenizer_come(stub: Stub, tmp_path: Path) -> None:
    folder = source_checkpoint(model(), tmp_path / "models")
    assert sorted(file.name for file in folder.iterdir() if not file.name.startswith(".")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert folder.name == COMMIT
    assert not [path for path in stub.seen if path.endswith((".bin", ".py"))]
    stub.answer = 503  # and from now on from the cache, without the hub
    assert source_checkpoint(model(revision=COMMIT), tmp_path / "models") == folder


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (401, "", ConfigError, "HF_TOKEN"),
        (401, "RepoNotFound", ConfigError, "model.hub_id"),
        (403, "GatedRepo", ConfigError, "gated"),
        (403, "", ConfigError, "gated"),
        (404, "RepoNotFound", ConfigError, "not on the hub"),
        (404, "RevisionNotFound", ConfigError, "model.revision"),
        (429, "", MeasurementError, "429"),
        (503, "", MeasurementError, "503"),
    ],
)
def test_refusals(stub: Stub, tmp_path: Path, status: int, code: str, kind: type, words: str) -> None:
    stub.answer, stub.error_code = status, code
    error = refused(tmp_path, model(revision="v1"))
    assert isinstance(error, kind)
    assert words in str(error)
    assert MODEL in str(error)
    if isinstance(error, MeasurementError):
        assert error.kind == "hub"
    else:
        assert len(stub.seen) <= 2  # no retry of what cannot get better


def test_rate_limit_is_waited_out(stub: Stub, tmp_path: Path) -> None:
    stub.answer, stub.fail_first = 429, 2
    assert source_checkpoint(model(), tmp_path / "models").name == COMMIT


def test_unreachable_hub_and_empty_cache(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    error = refused(tmp_path, model())
    assert isinstance(error, MeasurementError)
    assert error.kind == "hub"
    assert "cannot be reached" in str(error)


def test_offline_mode_and_empty_cache(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(tmp_path, model())
    assert isinstance(error, MeasurementError)
    assert error.kind == "hub"
    assert not stub.seen


def test_a_name_that_is_no_hub_id(stub: Stub, tmp_path: Path) -> None:
    assert isinstance(refused(tmp_path, model(hub_id="no such/id/at all")), ConfigError)


def test_only_pickled_weights_on_the_hub(stub: Stub, tmp_path: Path) -> None:
    (stub.folder / "model.safetensors").unlink()
    with pytest.raises(EvalqError, match="safetensors"):
        source_checkpoint(model(), tmp_path / "models")
