"""Which last verdicts the kept documents have already given: a file per model and device, and the level of the next one.

One last verdict has the gate's error rate. A second search on the same kept documents, with another method or other options,
would be a second chance, and the tenth would pass by luck. So every series of last verdicts is noted before its first test is
made, and the next one on any of the same documents is held to a stricter confidence (`evalq.judge.repeated`). The same search
again is the same series: it gives the same answer at the same level.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evalq.errors import RecordError
from evalq.judge.repeated import level
from evalq.quantize.store import Progress, locked
from evalq.records import write_text

UNKNOWN = "begun"  # a test whose verdict was not noted: evalq was killed while it judged
NO_LOOK = ("INVALID", "FAILED")  # nothing was learned about the quality


def text_hash(text: str) -> str:
    """How a document is known in the file."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass
class Series:
    """Last verdicts of one search, in its order. `verdicts`: candidate (config hash) -> status, of those that were judged."""

    order: list[str]  # config hashes, gentlest first
    documents: list[str]  # text hashes
    policy: str  # hash of the gate
    level: float  # part of the gate's error rate
    created_at: str
    verdicts: dict[str, str] = field(default_factory=dict)

    @property
    def looked(self) -> bool:
        return any(status not in NO_LOOK for status in self.verdicts.values())

    @property
    def passed(self) -> bool:
        """Whether every test of the order was made and passed."""
        return all(self.verdicts.get(one) == "PASS" for one in self.order)


@dataclass
class KeptDocuments:
    """The file of one model on one device. Use under `kept_documents`, which holds its lock."""

    file: Path
    series: list[Series]

    def open(self, order: Sequence[str], documents: Sequence[str], policy: str) -> Series:
        """The series of this order: the one that is noted, or a new one at the level that is left."""
        for one in self.series:
            if (one.order, one.documents, one.policy) == (list(order), list(documents), policy) and one.looked:
                return one
        self.series = [one for one in self.series if one.looked]
        mine = set(documents)
        earlier = [one.passed for one in self.series if mine & set(one.documents)]
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = Series(list(order), list(documents), policy, level(earlier), now)
        self.series.append(found)
        return found

    def number(self, series: Series) -> int:
        """Which series on these documents it is, from 1."""
        mine = set(series.documents)
        place = next(i for i, one in enumerate(self.series) if one is series)
        return 1 + sum(1 for one in self.series[:place] if mine & set(one.documents))

    def level_of(self, series: Series, candidate: str) -> float:
        """Part of the error rate for one candidate: the series', or that at which an earlier one passed it; a pass stays one."""
        same = [one for one in self.series if (one.documents, one.policy) == (series.documents, series.policy)]
        return max([series.level, *(one.level for one in same if one.verdicts.get(candidate) == "PASS")])

    def note(self, series: Series, candidate: str, status: str) -> None:
        """Write down that a candidate is judged now (UNKNOWN), or how that ended."""
        if status != UNKNOWN or candidate not in series.verdicts:
            series.verdicts[candidate] = status
        document = {"series": [asdict(one) for one in self.series]}
        write_text(self.file, json.dumps(document, indent=1) + "\n")


@contextlib.contextmanager
def kept_documents(folder: Path, name: str, progress: Progress | None = None) -> Iterator[KeptDocuments]:
    """Hold folder/NAME.json alone: two searches that judge on the same documents go one after the other.

    Errors: RecordError for a file that is none of these.
    """
    file = folder / f"{name}.json"
    with locked(file, progress):
        yield KeptDocuments(file, read_series(file))


def read_series(file: Path) -> list[Series]:
    """What is noted; nothing where there is no file. Errors: RecordError for a file that is no such notes."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = [Series(**one) for one in data["series"]]
        if not all(_is_series(one) for one in found):
            raise ValueError("a series with values of another kind")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{file}, which notes the last verdicts on the kept documents, cannot be read ({error}); put back a whole copy, or "
            "move it away and keep other documents for the next last verdict (another data set or tasks.perplexity_from)"
        ) from error
    return found


def _is_series(one: Series) -> bool:
    lists = (one.order, one.documents, list(one.verdicts), list(one.verdicts.values()))
    texts = all(isinstance(item, str) for values in lists for item in values)
    return texts and isinstance(one.level, float) and 0.0 < one.level <= 1.0 and isinstance(one.created_at, str)
