"""Which last verdicts the kept documents have already given: a file per checkpoint and device, and the level of the next one.

One last verdict has the gate's error rate. A second search on the same kept documents, with another method or other options,
would be a second chance, and the tenth would pass by luck. So every series of last verdicts is noted before its first test is
made, and the next one on any of the same documents is held to a stricter confidence (`evalq.judge.repeated`). The same search
again is the same series: it gives the same answer at the same level. Why so: docs/design/repeated-verdicts.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evalq.errors import ConfigError, MeasurementError, RecordError
from evalq.judge.repeated import LEAST_LEVEL, level
from evalq.quantize.store import Progress, locked
from evalq.records import VERDICTS, from_mapping, parse_json, write_text

PASSED = "PASS"
BEGUN = "begun"  # judged, and its verdict not noted: evalq was killed in between. It counts as a look


def text_hash(text: str) -> str:
    """How a document is known: by its letters and digits alone, since blanks and signs change with the detokenizer."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(sign for sign in plain if unicodedata.category(sign)[0] in "LNM")  # letters, numbers, their marks
    return hashlib.sha256((letters or text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass
class Series:
    """Last verdicts of one search, in its order. A candidate is in `verdicts` from the moment at which it was judged."""

    order: list[str]  # keys of candidates, gentlest first
    documents: list[str]  # hashes of the texts, and of the items of tasks whose margins gate
    policy: str  # hash of the gate
    level: float  # part of the gate's error rate
    created_at: str
    verdicts: dict[str, str] = field(default_factory=dict)  # key of a candidate -> its status or BEGUN

    @property
    def passed(self) -> bool:
        """Whether every test of the order was made and passed."""
        return all(self.verdicts.get(one) == PASSED for one in self.order)


@dataclass
class KeptDocuments:
    """The notes of one checkpoint on one device, in a file. Use it under `kept_documents`, which holds its lock."""

    file: Path
    series: list[Series]

    def open(self, order: Sequence[str], documents: Sequence[str], policy: str) -> Series:
        """The series of this order: the one that is noted, or a new one (not yet noted) at the level that is left.

        Errors: ConfigError when so little is left that the documents are used up.
        """
        for one in self.series:
            if (one.order, one.documents, one.policy) == (list(order), list(documents), policy):
                return one
        earlier = self.on_same(documents)
        part = level([one.passed for one in earlier])
        if part < LEAST_LEVEL:
            raise used_up(len(earlier))
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Series(list(order), list(documents), policy, part, now)

    def on_same(self, documents: Sequence[str]) -> list[Series]:
        """The noted series on any of these documents, or on any of the documents of one that is: in their order."""
        joined, found = set(documents), [False] * len(self.series)
        while True:
            new = [i for i, one in enumerate(self.series) if not found[i] and joined & set(one.documents)]
            if not new:
                return [one for one, is_one in zip(self.series, found, strict=True) if is_one]
            for i in new:
                found[i] = True
                joined |= set(self.series[i].documents)

    def number(self, series: Series) -> int:
        """Which series on these documents it is, from 1."""
        same = self.on_same(series.documents)
        return 1 + next((i for i, one in enumerate(same) if one is series), len(same))

    def level_of(self, series: Series, candidate: str) -> float:
        """Part of the error rate for one candidate: the series', or that at which an earlier one passed it; a pass stays one."""
        same = [one for one in self.series if (one.documents, one.policy) == (series.documents, series.policy)]
        return max([series.level, *(one.level for one in same if one.verdicts.get(candidate) == PASSED)])

    def begin(self, series: Series, candidate: str) -> str | None:
        """Note that a candidate is judged now. What was noted of it before in this series; None for the first time."""
        before = series.verdicts.get(candidate)
        if before is None:
            series.verdicts[candidate] = BEGUN
            self._save(series)
        return before

    def settle(self, series: Series, candidate: str, status: str) -> None:
        """Note how it ended. What once did not pass never becomes a pass."""
        if series.verdicts.get(candidate) in (None, BEGUN, PASSED):
            series.verdicts[candidate] = status
        self._save(series)

    def withdraw(self, series: Series, candidate: str) -> None:
        """Take back what `begin` noted for the first time: nothing was shown of the candidate's quality."""
        del series.verdicts[candidate]
        self._save(series)

    def _save(self, series: Series) -> None:
        if not any(one is series for one in self.series):
            self.series.append(series)
        self.series = [one for one in self.series if one.verdicts]  # a series without a look is as if it had not been
        document = {"series": [dataclasses.asdict(one) for one in self.series]}
        try:
            write_text(self.file, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise _unwritable(self.file, error) from error


@contextlib.contextmanager
def kept_documents(file: Path, progress: Progress | None = None) -> Iterator[KeptDocuments]:
    """Hold the notes alone: two searches that judge on the same documents go one after the other.

    Errors: RecordError for a file that is no such notes; MeasurementError(disk) where none can be written.
    """
    other = f"another search that judges on the same kept documents ({file.name})"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(file, progress, other))
        except (OSError, MeasurementError) as error:
            raise _unwritable(file, error) from error
        yield KeptDocuments(file, read_series(file))


def read_series(file: Path) -> list[Series]:
    """What is noted; nothing where there is no file. Errors: RecordError for a file that is no such notes."""
    try:
        data = parse_json(file.read_text(encoding="utf-8"), "it")
        if not isinstance(data, dict) or list(data) != ["series"]:
            raise RecordError("it holds no series")
        found: list[Series] = from_mapping(list[Series], data["series"], "series")
        if not all(0.0 < one.level <= 1.0 and one.documents and one.verdicts for one in found):
            raise RecordError("a series without a level, documents or verdicts")
        if not {status for one in found for status in one.verdicts.values()} <= {*VERDICTS, BEGUN}:
            raise RecordError("a verdict of another name")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError, RecordError) as error:
        raise RecordError(
            f"{file}, which notes the last verdicts on the kept documents, cannot be read ({error}); put back a whole copy, or "
            "move it away and keep other documents for the next last verdict (another data set or tasks.perplexity_from)"
        ) from error
    return found


def used_up(series: int) -> ConfigError:
    """The refusal of documents that have given so many series that no error rate is left."""
    return ConfigError(
        f"the documents kept for the last verdict have given {series} series of last verdicts, and what is left of "
        "the error rate is too little to judge by; keep other documents (tasks.perplexity_from, another data set)"
    )


def require_writable(file: Path) -> None:
    """Refuse a place where no notes can be kept, before anything is measured. Errors: MeasurementError(disk)."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError | MeasurementError) -> MeasurementError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return MeasurementError(
        f"last verdicts cannot be noted in {file.parent} ({reason}); free some space, or choose another folder with paths.root",
        "disk",
    )
