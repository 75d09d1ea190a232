"""How often the gate is wrong, by simulation: many draws of documents at once, the gate's own intervals on each.

The population: document lengths lognormal with the spread of the 62 articles of wikitext-2's test set (mean of ln words
7.84, standard deviation 1.06); the loss per word has a document effect and token noise that shrinks with length, half
of the variance each at 1,000 words, both with the same kind of tail. Its mean is zero for every length, so the truth
of D is the effect put in, and every interval moves with the effect: one set of draws serves all effects.
Mirrored damage mirrors every interval, so the false fails of a law are the false passes of its mirror image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evalq.judge.paired import Floats, effective_df, resample_counts
from evalq.judge.sequential import look_confidence
from evalq.judge.skewness import concentration, ends, rate_skewness
from evalq.plan.quantiles import normal_quantile, t_quantile

LOG_WORDS = (7.84, 1.06)  # mean and standard deviation of ln(words)
EFFECTS = (0.0, 0.005, 0.009, 0.010, 0.011, 0.015, 0.03)  # true perplexity increase
REPORTED = ("gate", "check")  # what a verdict shows: the deciding interval and the symmetric studentised bootstrap
STUDIED = (
    "linearised",
    "jackknife",
    "bootstrap-t",
    "bca",
    "outer",
)  # tried and rejected; "outer": the wider of jackknife and bootstrap-t
METHODS = REPORTED + STUDIED
CHUNK = 250  # draws at a time
NOISES = ("mixed", "token", "document", "equal")  # equal: as mixed, every document has about 210 words


def _lognormal(sigma: float) -> Callable[[np.random.Generator, tuple[int, int]], Floats]:
    mean, variance = math.exp(sigma**2 / 2.0), (math.exp(sigma**2) - 1.0) * math.exp(sigma**2)
    return lambda rng, size: (np.exp(rng.normal(0.0, sigma, size)) - mean) / math.sqrt(variance)


# Loss per word around its mean, standard deviation 1.
TAILS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "t3": lambda rng, size: rng.standard_t(3, size) / math.sqrt(3.0),
    "skewed": _lognormal(0.5),  # skewness 1.75, excess kurtosis 5.9: damage sits in some documents
    "very skewed": _lognormal(1.0),  # skewness 6.2, excess kurtosis 111: a stress test
    "exponential": lambda rng, size: rng.exponential(1.0, size) - 1.0,  # skewness 2
    "gamma": lambda rng, size: (rng.gamma(0.5, 1.0, size) - 0.5) / math.sqrt(0.5),  # skewness 2.8
    "one in ten": lambda rng, size: _one_in_ten(rng, size),  # a tenth of the documents lies 4 deviations higher
}


def _one_in_ten(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    values = rng.standard_normal(size) + np.where(rng.random(size) < 0.1, 4.0, 0.0)
    return np.asarray((values - 0.4) / math.sqrt(1.0 + 0.1 * 0.9 * 16.0))


@dataclass(frozen=True)
class Draws:
    """Simulated comparisons with no effect: d and w, each (draws, documents)."""

    d: Floats
    w: Floats


def draw(tail: str, documents: int, draws: int, noise: float, rng: np.random.Generator, kind: str = "mixed") -> Draws:
    """`noise`: standard deviation of the loss per word of a 1,000-word document, nats; `kind`: one of NOISES."""
    size = (draws, documents)
    words = (math.log(210.0), 0.1) if kind == "equal" else LOG_WORDS
    w = np.maximum(np.round(np.exp(rng.normal(*words, size))), 20.0)
    token = {"token": 1.0, "document": 0.0}.get(kind, 0.5)  # share of the variance at 1,000 words
    spread = noise * np.sqrt(1.0 - token + token * 1000.0 / w)
    return Draws(w * spread * TAILS[tail](rng, size), w)


def gate_bounds(data: Draws, confidence: float) -> tuple[Floats, Floats]:
    """Bounds of D that the gate decides by, for every draw; (draws,) both. As `judge.paired.Ratio.interval`."""
    found = [_gate(chunk, confidence) for chunk in _chunks(data)]
    return _join(found, 0), _join(found, 1)


def _gate(data: Draws, confidence: float) -> tuple[Floats, Floats]:
    value, residual, _, jackknife = _errors(data)
    t = _t_quantiles(0.5 + confidence / 2.0, effective_df(data.w))
    below, above = ends(t, rate_skewness(residual, data.w), concentration(data.w), data.w.shape[1])
    return value - below * jackknife, value + above * jackknife


def _errors(data: Draws) -> tuple[Floats, Floats, Floats, Floats]:
    """D, the residuals, the shifts of D without each document, and the jackknife error."""
    d, w, n = data.d, data.w, data.d.shape[1]
    total = w.sum(axis=1, keepdims=True)
    value = d.sum(axis=1) / total[:, 0]
    residual = d - value[:, None] * w
    shift = residual / (total - w)
    jackknife = np.sqrt((n - 1) / n * ((shift - shift.mean(axis=1, keepdims=True)) ** 2).sum(axis=1))
    return value, residual, shift, jackknife


def batch_intervals(
    data: Draws, confidence: float, resamples: int, rng: np.random.Generator
) -> dict[str, tuple[Floats, Floats]]:
    """Bounds of D by every method for every draw; name -> (low, high), each (draws,). As in `judge.paired`."""
    parts: dict[str, list[tuple[Floats, Floats]]] = {name: [] for name in METHODS}
    for chunk in _chunks(data):
        for name, bounds in _intervals(chunk, confidence, resamples, rng).items():
            parts[name].append(bounds)
    return {name: (_join(found, 0), _join(found, 1)) for name, found in parts.items()}


def _join(found: list[tuple[Floats, Floats]], side: int) -> Floats:
    return np.concatenate([bounds[side] for bounds in found])


def _chunks(data: Draws) -> Iterator[Draws]:
    for start in range(0, len(data.d), CHUNK):
        yield Draws(data.d[start : start + CHUNK], data.w[start : start + CHUNK])


def _intervals(
    data: Draws, confidence: float, resamples: int, rng: np.random.Generator
) -> dict[str, tuple[Floats, Floats]]:
    n = data.d.shape[1]
    value, residual, shift, jackknife = _errors(data)
    linear = np.sqrt(n / (n - 1) * (residual**2).sum(axis=1)) / data.w.sum(axis=1)
    level = 0.5 + confidence / 2.0
    t, t_few = t_quantile(level, n - 1.0), _t_quantiles(level, effective_df(data.w))
    replicates, ses = _resample(data, resample_counts(n, resamples, rng))
    studentised = (replicates - value) / np.maximum(ses, np.finfo(float).tiny)
    student = value - t_few * jackknife, value + t_few * jackknife
    boot = _equal_tailed(value, jackknife, studentised, confidence)
    half = np.quantile(np.abs(studentised), confidence, axis=0) * jackknife
    return {
        "gate": _gate(data, confidence),
        "check": (value - half, value + half),
        "linearised": (value - t * linear, value + t * linear),
        "jackknife": student,
        "bootstrap-t": boot,
        "bca": _bca(value, shift, replicates, confidence),
        "outer": (np.minimum(student[0], boot[0]), np.maximum(student[1], boot[1])),
    }


def _t_quantiles(p: float, df: Floats) -> Floats:
    """Student quantiles for many degrees of freedom at once."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(df, p))


def _resample(data: Draws, counts: Floats) -> tuple[Floats, Floats]:
    """Replicates of D and of its standard error; (resamples, draws) both. One set of resamples serves a chunk."""
    d, w, n = data.d, data.w, data.d.shape[1]
    weight = counts @ w.T
    values = counts @ d.T / weight
    squares = counts @ (d * d).T - 2.0 * values * (counts @ (d * w).T) + values**2 * (counts @ (w * w).T)
    return values, np.sqrt(np.maximum(squares, 0.0) * n / (n - 1)) / weight


def _equal_tailed(value: Floats, se: Floats, studentised: Floats, confidence: float) -> tuple[Floats, Floats]:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(studentised, [tail, 1.0 - tail], axis=0)
    return value - high * se, value - low * se


def _bca(value: Floats, shift: Floats, replicates: Floats, confidence: float) -> tuple[Floats, Floats]:
    ordered = np.sort(replicates, axis=0)
    size = len(ordered)
    pull = shift - shift.mean(axis=1, keepdims=True)
    acceleration = (pull**3).sum(axis=1) / (6.0 * (pull**2).sum(axis=1) ** 1.5)
    below = np.clip((replicates < value).mean(axis=0), 1.0 / size, 1.0 - 1.0 / size)
    bias = np.array([normal_quantile(float(p)) for p in below])
    bounds = []
    for p in ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0):
        moved = bias + normal_quantile(p)
        z = bias + moved / (1.0 - acceleration * moved)
        level = np.array([0.5 * math.erfc(-float(x) / math.sqrt(2.0)) for x in z])
        place = np.clip(np.round(level * (size - 1)).astype(int), 0, size - 1)
        bounds.append(ordered[place, np.arange(len(place))])
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class Rates:
    """Shares of draws at one true effect. `documents`: mean number used."""

    effect: float
    passed: float  # within the target
    warned: float  # PASS with a warning
    inconclusive: float
    failed: float
    documents: float

    def false_pass(self, target: float, limit: float) -> float:
        """PASS although the truth is at or above the target; a warned PASS when it is at or above the limit."""
        wrong = self.passed if self.effect >= target else 0.0
        return wrong + (self.warned if self.effect >= limit else 0.0)

    def false_fail(self, limit: float) -> float:
        """FAIL although the truth is at or below the limit."""
        return self.failed if self.effect <= limit else 0.0


def rates(
    looks: Sequence[tuple[int, Floats, Floats]], effect: float, target: float = 0.01, limit: float = 0.015
) -> Rates:
    """What the gate says at `effect`, from the bounds at each look (documents, low, high) of draws without effect."""
    move, at_target, at_limit = math.log1p(effect), math.log1p(target), math.log1p(limit)
    size = len(looks[0][1])
    status, used = np.zeros(size, int), np.full(size, looks[-1][0])  # 0 inconclusive, 1 pass, 2 warned, 3 fail
    for documents, low, high in looks:
        now = np.where(high + move <= at_target, 1, np.where(high + move <= at_limit, 2, 0))
        now = np.where(low + move > at_limit, 3, now)
        stops = (status == 0) & (now > 0)
        status[stops], used[stops] = now[stops], documents
    passed, warned, open_, failed = (float(np.mean(status == code)) for code in (1, 2, 0, 3))
    return Rates(effect, passed, warned, open_, failed, float(used.mean()))


def sequential_bounds(data: Draws, looks: Sequence[int], confidence: float) -> list[tuple[int, Floats, Floats]]:
    """Bounds of the gate's interval over the first documents at each look, at that look's level."""
    found = []
    for count in looks:
        part = Draws(data.d[:, :count], data.w[:, :count])
        found.append((count, *gate_bounds(part, look_confidence(looks, count, confidence))))
    return found
