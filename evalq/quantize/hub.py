"""Fetching a checkpoint from the hub: safetensors, JSON and tokenizer only; every failure one plain sentence."""

from __future__ import annotations

import os
import time
from pathlib import Path

from evalq.config import ModelConfig
from evalq.errors import ConfigError, EvalqError, MeasurementError, MissingExtraError
from evalq.quantize.store import disk_errors

PATTERNS = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
RETRY_SECONDS = (5.0, 30.0, 120.0)  # waits after 429 and 5xx, on top of the client's own
RETRY_STATUS = (429, 500, 502, 503, 504)


def hub_checkpoint(model: ModelConfig) -> Path:
    """Snapshot folder of the model's revision, from the hub's own cache or fetched into it.

    Errors: ConfigError (unknown or gated model or revision), MeasurementError(hub) (offline, refused, rate limited).
    """
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise MissingExtraError("fetching a model from the hub", "huggingface-hub", "measure") from error
    if not model.hub_id:
        raise ConfigError(
            f"model {model.name} has no hub_id; give model.hub_id=OWNER/NAME or model.path=/your/checkpoint"
        )
    patterns = [*PATTERNS, "*.py"] if model.trust_remote_code else list(PATTERNS)
    for wait in (*RETRY_SECONDS, None):
        try:
            with disk_errors(Path(constants.HF_HUB_CACHE)):
                folder = snapshot_download(
                    model.hub_id,
                    revision=model.revision,
                    allow_patterns=patterns,
                    endpoint=os.environ.get("HF_ENDPOINT") or None,
                )
            return Path(folder)
        except (OSError, ValueError, ConnectionError) as error:
            if wait is None or _status(error) not in RETRY_STATUS:
                raise explain(error, model) from error
            time.sleep(wait)
    raise AssertionError("unreachable")


def _status(error: BaseException) -> int | None:
    """HTTP status of an error or of what caused it, if any."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return None


def explain(error: BaseException, model: ModelConfig) -> EvalqError:
    """The hub client's error as one sentence: what was asked for, what to do."""
    from huggingface_hub import errors

    what = f"the model {model.hub_id}" + (f" at revision {model.revision}" if model.revision else "")
    own = "or give a folder with model.path=/your/checkpoint"
    status = _status(error)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return ConfigError(f"{what} is gated: accept its licence on the hub and set HF_TOKEN, {own}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{what} does not exist, though the model does; correct model.revision, {own}")
    if status == 401:
        return ConfigError(
            f"the hub refused {what} (401): correct model.hub_id, or set HF_TOKEN to a valid token, {own}"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"model.hub_id={model.hub_id!r} is no hub id; write OWNER/NAME, {own}")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return ConfigError(f"{what} is not on the hub (404): correct model.hub_id, {own}")
    if status in RETRY_STATUS:
        return MeasurementError(f"the hub answered {status} for {what} again and again: try later, {own}", kind="hub")
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError | ConnectionError):
        return MeasurementError(
            f"{what} is not in the local cache and the hub cannot be reached: connect, {own}", "hub"
        )
    return MeasurementError(f"{what} could not be fetched ({str(error).splitlines()[0]}): try again, {own}", kind="hub")
