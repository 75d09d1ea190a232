"""A study's view: every candidate judged, looked into, and set beside the others."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from evalq.config import GateConfig
from evalq.errors import EvalqError, RecordError
from evalq.facts.confdir import conf_dir
from evalq.judge.comparable import differences
from evalq.judge.fidelity import fidelity, token_pairs
from evalq.judge.floor import aa_floor, read_floor
from evalq.judge.gate import judge
from evalq.judge.multiplicity import holm_fails
from evalq.judge.policy import read_policy
from evalq.records import Estimate, Record, Verdict, read_table
from evalq.report.page.view import Candidate, Causes, Group, StudyView
from evalq.report.progress import QuietWatcher
from evalq.study.cache import cache_of
from evalq.study.causes import find_causes
from evalq.study.claims import claims_of
from evalq.study.gather import Bundle, Found, brief, bundle, read_all
from evalq.study.tradeoff import placed_cells, recommendation


def build_study(
    folders: Sequence[Path],
    title: str | None = None,
    command: str = "",
    policy: str = "default",
    anew: bool = False,
    watcher: QuietWatcher | None = None,
) -> StudyView:
    """The view of all records in `folders`. `anew`: judge again even where a verdict is kept. `watcher` sees schemes done.

    Errors: RecordError when there is no record; ConfigError for the policy.
    """
    notes: list[str] = []
    gate = read_policy(policy)
    bundles = bundle(read_all(folders, notes), notes)
    total, shown = sum(len(home.candidates) for home in bundles), watcher or QuietWatcher()
    shown.stage("report", f"comparing {total} scheme{'s' if total != 1 else ''} with their baselines")
    counter = itertools.count(1)

    def told() -> None:
        shown.progress(next(counter), total, "schemes")

    groups = [_group(home, gate, anew, notes, told) for home in bundles]
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return StudyView(title or _title(groups), groups, command, list(dict.fromkeys(notes)), made)


def _title(groups: Sequence[Group]) -> str:
    names = dict.fromkeys(f"{group.model} on {group.gpu}" for group in groups)
    count = sum(len(group.candidates) for group in groups)
    return f"{', '.join(names)}: {count} scheme{'s' if count != 1 else ''}"


def _group(home: Bundle, gate: GateConfig, anew: bool, notes: list[str], told: Callable[[], None]) -> Group:
    floor = _floor(home, gate, notes)
    found = [_judged(one, home.baseline, gate, floor, anew, notes) for one in home.candidates]
    corrected = holm_fails([verdict for _, verdict in found])
    candidates = []
    for (one, verdict), p in zip(found, corrected, strict=True):
        candidates.append(dataclasses.replace(_candidate(one, home.baseline, verdict), p_holm=p))
        told()
    shown = home.baseline or home.candidates[0]
    cell = shown.record.cell
    group = Group(
        cell.model,
        cell.gpu,
        cell.engine,
        home.baseline.record if home.baseline else None,
        candidates,
        floor,
        _model_notes(shown.folder, cell.model),
    )
    placed = placed_cells((home.baseline.record, home.baseline.folder) if home.baseline else None, candidates)
    return dataclasses.replace(
        group, claims=claims_of(group), placed=placed, recommendation=recommendation(candidates, placed)
    )


def _floor(home: Bundle, gate: GateConfig, notes: list[str]) -> Estimate | None:
    """The A/A floor from a repeated baseline among the records, else the one kept beside them."""
    if home.baseline is None:
        return None
    base = home.baseline
    try:
        if home.repeats:
            again = home.repeats[-1]
            return aa_floor(base.record, base.folder, again.record, again.folder, gate.metric, gate.confidence)
        return read_floor(base.folder.parent, base.record, gate.metric)
    except EvalqError as error:
        notes.append(f"no A/A floor: {brief(error, base.folder)}")
        return None


def _judged(
    one: Found, baseline: Found | None, gate: GateConfig, floor: Estimate | None, anew: bool, notes: list[str]
) -> tuple[Found, Verdict | None]:
    """A candidate with its verdict: the kept one, else one made now with the policy given."""
    if is_speed_only(one.record):
        return one, None
    if one.verdict is not None and not anew:
        return one, one.verdict
    if baseline is None:
        notes.append(f"{one.record.cell.quant} has no baseline among these records, so it has no verdict")
        return one, None
    verdict = judge(baseline.record, baseline.folder, one.record, one.folder, gate, floor=floor)
    notes.append(f"{one.record.cell.quant} was judged when this report was made, by the policy {gate.name}")
    return one, verdict


def is_speed_only(record: Record) -> bool:
    """Whether a record measured memory and speed alone: random weights, or no task."""
    return record.failure is None and (record.fingerprint.get("load_format") == "dummy" or not record.tasks)


def _candidate(one: Found, baseline: Found | None, verdict: Verdict | None) -> Candidate:
    if baseline is None or one.record.failure is not None:
        return Candidate(one.record, one.folder, verdict, find_nothing(one.record))
    places = (baseline.record, baseline.folder), (one.record, one.folder)
    made = Candidate(
        one.record,
        one.folder,
        verdict,
        find_causes(*places),
        differences=[str(item) for item in differences(baseline.record, one.record)],
        cache=cache_of(*places),
    )
    try:
        tables = [read_table(folder, record, "tokens") for record, folder in places]
        if tables[0] is None or tables[1] is None:
            return made
        same_baseline = one.record.divergence_from == baseline.record.reuse_key
        found = fidelity(token_pairs(tables[0], tables[1], exact=same_baseline))
    except RecordError as error:
        return dataclasses.replace(made, notes=[f"no fidelity: {brief(error, baseline.folder, one.folder)}"])
    return dataclasses.replace(made, fidelity=found.estimates, buckets=found.buckets)


def find_nothing(record: Record) -> Causes:
    """The causes of a record that cannot be compared."""
    reason = record.failure.message if record.failure else "there is no baseline among these records"
    return Causes(missing=[reason])


def _model_notes(folder: Path, model: str) -> list[str]:
    """What is said about the weights: the config kept beside the record, else conf/model."""
    for file in (folder / "config.yaml", conf_dir() / "model" / f"{Path(model).name}.yaml"):
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
            notes = data["model"]["notes"] if file.name == "config.yaml" else data["notes"]
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
            continue
        return [str(note) for note in notes] if isinstance(notes, list) else []
    return []
