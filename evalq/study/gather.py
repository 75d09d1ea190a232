"""Which records a study has: found under folders, newest of each cell, each candidate beside its baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.comparable import differences
from evalq.judge.floor import MAY_DIFFER
from evalq.judge.gate import contradiction
from evalq.records import RECORD_FILE, VERDICT_FILE, Record, Verdict, parse_json, read_record, read_verdict


@dataclass(frozen=True)
class Found:
    """A record that could be read, its folder, and the verdict beside it (None: there is none that can be believed)."""

    record: Record
    folder: Path
    verdict: Verdict | None = None


@dataclass
class Bundle:
    """One baseline, its repetitions in another order, and its candidates."""

    baseline: Found | None
    repeats: list[Found] = field(default_factory=list)
    candidates: list[Found] = field(default_factory=list)


def brief(error: Exception, *folders: Path) -> str:
    """An error's sentence with names in place of absolute paths: a report travels, and where it was made is nobody's business."""
    text = str(error)
    for folder in folders:
        text = text.replace(str(folder), folder.name)
    return text


def record_folders(place: Path) -> list[Path]:
    """The record folders at or under a folder; hidden folders (work in progress) are none."""
    if (place / RECORD_FILE).is_file():
        return [place]
    found = (file.parent for file in sorted(place.rglob(RECORD_FILE)))
    return [folder for folder in found if not any(part.startswith(".") for part in folder.relative_to(place).parts)]


def read_all(folders: Iterable[Path], notes: list[str]) -> list[Found]:
    """Every readable record once, oldest first; what cannot be read is a note. Errors: RecordError when nothing is left."""
    found: dict[str, Found] = {}
    for folder in folders:
        try:
            record = read_record(folder)
        except RecordError as error:
            notes.append(f"left out: {brief(error, folder)}")
            continue
        found.setdefault(record.record_id, Found(record, folder, _verdict_beside(folder, record, notes)))
    if not found:
        raise RecordError("none of the places given holds a record that can be read; give record folders or a study")
    return sorted(found.values(), key=lambda one: one.record.created_at)


def _verdict_beside(folder: Path, record: Record, notes: list[str]) -> Verdict | None:
    """verdict.json of a record; one that is damaged, of another record or contradicts itself is not believed."""
    if not (folder / VERDICT_FILE).is_file():
        return None
    try:
        verdict = read_verdict(folder)
    except RecordError as error:
        notes.append(f"verdict not believed: {brief(error, folder)}")
        return None
    problem = contradiction(verdict)
    if verdict.candidate_id != record.record_id:
        problem = f"it is about {verdict.candidate_id}"
    if problem:
        notes.append(f"the verdict beside {record.record_id} was not believed: {problem}")
        return None
    return verdict


def is_repeat(record: Record) -> bool:
    """Whether a baseline was measured in another order, as the second half of an A/A pair."""
    return record.cell.is_baseline and record.fingerprint.get("request_order") == "reverse"


def bundle(found: Sequence[Found], notes: list[str]) -> list[Bundle]:
    """Candidates with the baseline that their verdict names, else with one of an equal fingerprint, else of equal names."""
    baselines = [one for one in found if one.record.cell.is_baseline and not is_repeat(one.record)]
    bundles = {one.record.record_id: Bundle(one) for one in baselines}
    lonely: dict[tuple[str, str, str], Bundle] = {}
    for one in found:
        if one.record.cell.is_baseline:
            continue
        owner = _baseline_of(one, baselines)
        names = (one.record.cell.model, one.record.cell.gpu, one.record.cell.engine)
        home = bundles[owner.record.record_id] if owner else lonely.setdefault(names, Bundle(None))
        home.candidates.append(one)
    for one in filter(lambda one: is_repeat(one.record), found):
        for home in bundles.values():
            if home.baseline is not None and _is_aa_pair(home.baseline.record, one.record):
                home.repeats.append(one)
    whole = [*bundles.values(), *lonely.values()]
    with_candidates = [home for home in whole if home.candidates]
    if with_candidates and len(with_candidates) < len(whole):
        notes.append(f"{len(whole) - len(with_candidates)} baseline records without candidates are not shown")
    return [_newest(home, notes) for home in sorted(with_candidates or whole, key=lambda home: -len(home.candidates))]


def _baseline_of(candidate: Found, baselines: Sequence[Found]) -> Found | None:
    named = candidate.verdict.baseline_id if candidate.verdict else None
    for one in reversed(baselines):
        if one.record.record_id == named:
            return one
    for one in reversed(baselines):
        if candidate.record.fingerprint and not differences(one.record, candidate.record):
            return one
    cell = candidate.record.cell
    names = (cell.model, cell.gpu, cell.engine)
    for one in reversed(baselines):
        if (one.record.cell.model, one.record.cell.gpu, one.record.cell.engine) == names:
            return one
    return None


def _is_aa_pair(first: Record, second: Record) -> bool:
    return all(item.field in MAY_DIFFER for item in differences(first, second))


def _newest(home: Bundle, notes: list[str]) -> Bundle:
    """The newest complete record of each scheme, else its newest; older ones are counted in a note."""
    kept: dict[str, Found] = {}
    for one in home.candidates:
        before = kept.get(one.record.cell.quant)
        if before is None or one.record.status == "complete" or before.record.status != "complete":
            kept[one.record.cell.quant] = one
    left = len(home.candidates) - len(kept)
    if left:
        notes.append(f"{left} older or unfinished records of the same schemes are not shown")
    home.candidates = sorted(kept.values(), key=lambda one: one.record.created_at)
    return home


def study_folders(records: Path, name: str) -> list[Path]:
    """The record folders of the study called `name`, as written down while it ran; empty when there is no such study."""
    for file in sorted((records / "studies").glob("*.json"), reverse=True):
        try:
            data = parse_json(file.read_text(encoding="utf-8"), str(file))
            if data["study"] == name:
                return [records / str(cell["folder"]) for cell in data["cells"]]
        except (RecordError, OSError, KeyError, TypeError, UnicodeDecodeError):
            continue  # another study's damaged file is no reason to refuse this one
    return []


def comparable_baseline(candidate: Record, place: Path) -> tuple[Record, Path] | None:
    """The newest finished baseline under `place` with the candidate's fingerprint; None when there is none."""
    if not place.is_dir():
        return None
    best: tuple[Record, Path] | None = None
    for folder in record_folders(place):
        try:
            record = read_record(folder)
        except RecordError:
            continue
        fits = record.cell.is_baseline and record.status == "complete" and not differences(record, candidate)
        if fits and (best is None or record.created_at > best[0].created_at):
            best = (record, folder)
    return best
