"""Whether times differ by more than their noise, told from a few steps on each side.

A step's time of a layer is modelled as level x factor of the step x noise of its own. The factor is common to all
layers (clock, load of the machine): the weighted median over them, step by step. What disturbs a step makes it slower,
so the level is the mean of the faster half of the steps (of logarithms, without the factor): with even noise it is a
sixth less certain than the mean of all, and it stays where it was when others are disturbed. It tells whether there is
a difference; what is shown is that of the means, and none is certain that goes the other way.

A few steps tell little of a layer's noise, so its variance is drawn towards that of the layers of about its time, the
more the less they differ in it (moderated t-statistic: Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). Runs of the same
thing also differ by what no step shows (addresses, caches); the spread of all changes does, so where that is wider than
the steps explain, every error is widened alike (empirical null: Efron, JASA 99, 2004). The level of chance is shared
by all that is compared (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

FALSE_ALARMS = 0.002  # chance of any false alarm, in a comparison of a thing with itself
LEAST_CHANGE = 0.02  # a smaller one is no difference
UNSTEADY = 0.25  # spread: of a layer that varies more from step to step, nothing is said
BUSY = 0.20  # on a CPU: what is all so much slower or faster tells of the machine
FEWEST_STEPS = 3  # of a side: fewer do not tell an odd step from the others
LEAST_CHANGE_UNKNOWN = 0.25  # where a side has fewer
_PRIOR_FREEDOM = (4.0, 40.0)  # least and most degrees of freedom that layers of about the same time count for
_NEIGHBOURS = 15  # of them, on each side
_FEW_UNITS = 8  # with fewer there is nothing to widen errors by
_LEVEL_ERROR = 1.16  # of the mean of the faster half, in standard errors of the mean of all (simulated: 1.08 to 1.17)
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of the mean (normal, many steps: the most)
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
# The standard deviation of n normal numbers but for the one farthest from their median, in true ones (simulated).
_DROPS_ODDEST = 4  # from so many steps on
_COUNTS = (4, 5, 6, 7, 8, 10, 15, 20, 50, 1000)
_WITHOUT_ODDEST = (0.603, 0.689, 0.725, 0.761, 0.781, 0.815, 0.862, 0.887, 0.941, 0.99)
_LOST_FREEDOM = 2.65  # of its degrees of freedom


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """How units changed from one side to the other: logarithms of ratios, one per unit."""

    common: float  # of the typical unit
    common_error: float  # its standard error; infinite where noise is not known
    shift: Float  # of each
    error: Float  # standard error of `shift - common`
    spread: Float  # standard deviation of one step's own noise; nan where no side has two steps
    critical: float  # how many standard errors are more than chance
    known: bool  # both sides have steps enough to tell noise by

    @property
    def excess(self) -> Float:
        """What each changed beyond the common change."""
        return self.shift - self.common

    def beyond_noise(self) -> npt.NDArray[np.bool_]:
        """Which units changed otherwise than the typical one."""
        least = LEAST_CHANGE if self.known else LEAST_CHANGE_UNKNOWN
        return np.abs(self.excess) > np.maximum(math.log1p(least), self.critical * self.error)


def unit_shifts(a: Float, b: Float, weight: Float) -> Shifts:
    """The shifts between two tables (units, steps) of positive times; `weight` of each unit in what is common.

    Where a side has one step, noise is taken from the other side, and where neither has more, from how much the
    units differ from one another: `known` is then false.
    """
    log_a, log_b = np.log(a), np.log(b)
    factor_a, factor_b = common_factors(log_a, weight), common_factors(log_b, weight)
    own_a, own_b = log_a - factor_a, log_b - factor_b
    shift = level(own_b) - level(own_a)
    common = weighted_median(shift, weight)
    scale = error_scale(a.shape[1], b.shape[1])
    variance, freedom = pooled_variance(own_a, own_b)
    size = log_a.mean(axis=1) + log_b.mean(axis=1)
    excess = np.abs(shift - common)
    if freedom > 0:
        moderated, freedom = _moderated(variance, freedom, size)
        spread = np.sqrt(moderated)
        error = spread * scale
        if len(shift) >= _FEW_UNITS:
            error = error * max(1.0, _MAD_TO_SIGMA * weighted_median(excess / np.maximum(error, 1e-12), weight))
    else:
        spread = np.full(len(shift), np.nan)
        error = _MAD_TO_SIGMA * _smoothed(excess, size)
    factors, factor_freedom = pooled_variance(factor_a[None, :], factor_b[None, :])
    chance = FALSE_ALARMS / max(1, len(shift))
    return Shifts(
        common=common,
        common_error=math.sqrt(float(factors[0])) * scale if factor_freedom > 0 else math.inf,
        shift=shift,
        error=error,
        spread=spread,
        critical=t_quantile(1 - chance / 2, max(freedom, _PRIOR_FREEDOM[0]) if freedom > 0 else _PRIOR_FREEDOM[1]),
        known=min(a.shape[1], b.shape[1]) >= FEWEST_STEPS,
    )


def levels(times: Float, weight: Float) -> tuple[Float, Float]:
    """Of each unit of a table (units, steps) of positive times: the logarithm of its level, and a step's own spread.

    The spread is that of the unit, and not less than that of units of about its time lets expect.

    What the steps have in common is left out by `weight`; of one unit nothing is.
    """
    logs = np.log(times)
    own = logs - common_factors(logs, weight) if len(times) > 1 else logs
    variance, freedom = _variance(own)
    if freedom > 0 and len(times) >= _FEW_UNITS:
        variance = np.maximum(variance, _moderated(variance, freedom, logs.mean(axis=1))[0])
    return level(own), np.sqrt(variance)


@dataclass(frozen=True, slots=True)
class Change:
    """How one series of times changed: logarithms."""

    shift: float
    error: float  # standard error; nan where noise is not known
    spread: float  # standard deviation of one step, the oddest left out; nan where not known
    beyond_noise: bool


def series_change(a: Float, b: Float) -> Change:
    """The change of the mean between two series of positive times, by themselves.

    It is beyond noise where that of the level is, or that of the mean, and both go one way: a step that was held up
    moves the mean alone, and many such steps are a difference.
    """
    if not ((a > 0).all() and (b > 0).all()):  # what took no time has no ratio
        return Change(0.0, math.nan, math.nan, False)
    log_a, log_b = np.log(a)[None, :], np.log(b)[None, :]
    shift, of_level = math.log(b.mean() / a.mean()), float((level(log_b) - level(log_a))[0])
    variance, freedom = pooled_variance(log_a, log_b)
    one_way = shift * of_level > 0
    if min(len(a), len(b)) < FEWEST_STEPS or freedom <= 0:
        return Change(shift, math.nan, math.nan, one_way and abs(shift) > math.log1p(LEAST_CHANGE_UNKNOWN))
    spread = math.sqrt(float(variance[0]))
    error = math.sqrt(sum(side.var(ddof=1) / len(side) / side.mean() ** 2 for side in (a, b)))
    far = t_quantile(1 - FALSE_ALARMS / 4, freedom) * spread * error_scale(len(a), len(b))
    mean_far = t_quantile(1 - FALSE_ALARMS / 4, len(a) + len(b) - 2) * error
    beyond = abs(of_level) > max(math.log1p(LEAST_CHANGE), far) or abs(shift) > mean_far
    return Change(shift, error, spread, one_way and beyond and abs(shift) > math.log1p(LEAST_CHANGE))


def clearly_apart(a: Float, b: Float, rest_a: Float, rest_b: Float) -> float:
    """Not 0 if, against the rest of its step, each time of `b` is over (above 0) or under each of `a`, by `BUSY`.

    Too weak a test for what has no reason to change, as one of many; good for what is known to do other work.
    """
    one, other = np.log(a) - np.log(rest_a), np.log(b) - np.log(rest_b)
    if min(len(one), len(other)) < FEWEST_STEPS:
        return 0.0
    shift, separate = float(np.median(other) - np.median(one)), one.max() < other.min() or other.max() < one.min()
    return shift if separate and abs(math.expm1(shift)) >= BUSY else 0.0


def ratio_change(a: Float, b: Float, rest_a: Float, rest_b: Float) -> Change:
    """How a part changed against the rest of the same steps: what holds up both cancels, step by step."""
    one, other = np.log(a) - np.log(rest_a), np.log(b) - np.log(rest_b)
    shift = float(np.median(other) - np.median(one))
    variance, freedom = pooled_variance(one[None, :], other[None, :])
    if min(len(one), len(other)) < FEWEST_STEPS or freedom <= 0:
        return Change(shift, math.nan, math.nan, abs(shift) > math.log1p(LEAST_CHANGE_UNKNOWN))
    spread = math.sqrt(float(variance[0]))
    error = spread * _MEDIAN_ERROR * math.sqrt(1 / len(one) + 1 / len(other))
    far = t_quantile(1 - FALSE_ALARMS / 2, freedom) * error
    return Change(shift, error, spread, abs(shift) > max(math.log1p(LEAST_CHANGE), far))


def own_spread(times: Float) -> float:
    """Standard deviation of a step's time, of logarithms, without the oddest step; nan of one step."""
    variance, freedom = _variance(np.log(times)[None, :])
    return math.sqrt(float(variance[0])) if freedom > 0 else math.nan


def common_factors(logs: Float, weight: Float) -> Float:
    """What each step has in common over all units: logarithms, 0 in the median step."""
    apart = logs - np.median(logs, axis=1, keepdims=True)
    return np.array([weighted_median(apart[:, step], weight) for step in range(logs.shape[1])])


def level(logs: Float) -> Float:
    """The mean of the faster half of the steps, of each unit."""
    fast = (logs.shape[1] + 1) // 2
    return np.asarray(np.sort(logs, axis=1)[:, :fast].mean(axis=1), dtype=np.float64)


def error_scale(steps_a: int, steps_b: int) -> float:
    """The standard error of a difference of levels, in standard deviations of a step."""
    parts = ((1.0 if steps == 1 else _LEVEL_ERROR) ** 2 / steps for steps in (steps_a, steps_b))
    return math.sqrt(sum(parts))


def pooled_variance(a: Float, b: Float) -> tuple[Float, float]:
    """Variance of a step of each unit, from both sides without the oddest step of each; degrees of freedom."""
    total, freedom = np.zeros(len(a)), 0.0
    for side in (a, b):
        variance, own = _variance(side)
        total += variance * own
        freedom += own
    return (total / freedom if freedom else total), freedom


def _variance(logs: Float) -> tuple[Float, float]:
    steps = logs.shape[1]
    if steps < 2:
        return np.zeros(len(logs)), 0.0
    if steps < _DROPS_ODDEST:
        return logs.var(axis=1, ddof=1), steps - 1.0
    apart = np.abs(logs - np.median(logs, axis=1, keepdims=True))
    kept = np.ones_like(logs, dtype=np.bool_)
    kept[np.arange(len(logs)), apart.argmax(axis=1)] = False
    rest = logs[kept].reshape(len(logs), steps - 1)
    short = float(np.interp(steps, _COUNTS, _WITHOUT_ODDEST))
    return rest.var(axis=1, ddof=1) / short**2, steps - _LOST_FREEDOM


def _moderated(variance: Float, freedom: float, size: Float) -> tuple[Float, float]:
    """Variances drawn towards those of units of about the same size, and the freedom that they have then."""
    low = (1 - 2 / (9 * freedom)) ** 3  # the median of a variance of so much freedom, in true ones (Wilson, Hilferty)
    prior = _smoothed(variance, size) / max(low, 0.1)
    prior_freedom = _prior_freedom(variance, prior, freedom)
    together = freedom + prior_freedom
    return (freedom * variance + prior_freedom * prior) / together, together


def _prior_freedom(variance: Float, prior: Float, freedom: float) -> float:
    """How much the noise of units is alike: few degrees of freedom where their variances differ more than by chance."""
    told = (variance > 0) & (prior > 0)
    if told.sum() < _FEW_UNITS:
        return _PRIOR_FREEDOM[0]
    apart = np.log(variance[told] / prior[told])
    seen = (_MAD_TO_SIGMA * float(np.median(np.abs(apart - np.median(apart))))) ** 2
    beyond = seen - trigamma(freedom / 2)
    least, most = _PRIOR_FREEDOM
    while most / least > 1.01:  # trigamma falls
        middle = math.sqrt(least * most)
        least, most = (middle, most) if trigamma(middle / 2) > beyond else (least, middle)
    return least


def trigamma(x: float) -> float:
    """The second derivative of the logarithm of the gamma function, to 1e-8 (Abramowitz and Stegun 6.4.6, 6.4.12)."""
    steps = 0.0
    while x < 10:
        steps += 1 / (x * x)
        x += 1
    return steps + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5) + 1 / (42 * x**7)


def _smoothed(values: Float, size: Float) -> Float:
    """The median among the neighbours in order of size."""
    order = np.argsort(size, kind="stable")
    ordered = values[order]
    smooth = np.empty_like(values)
    for place in range(len(values)):
        first = max(0, min(place - _NEIGHBOURS, len(values) - 2 * _NEIGHBOURS - 1))
        smooth[order[place]] = np.median(ordered[first : first + 2 * _NEIGHBOURS + 1])
    return smooth


def weighted_median(values: Float, weight: Float) -> float:
    """The value at half of the weight; 0 of nothing."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    place = int(np.searchsorted(reached, reached[-1] / 2))
    return float(values[order][min(place, len(values) - 1)])


def t_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t for a probability over 1/2 (Hill, Algorithm 396, CACM 13, 1970).

    To 1e-3 of it for 3 degrees of freedom or more, and better for more.
    """
    two_sided = 2 * (1 - probability)
    n = max(freedom, 1.0)
    a = 1 / (n - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * two_sided) ** (2 / n)
    if y > a + 0.05:
        x = NormalDist().inv_cdf(1 - probability)
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return math.sqrt(n * y)
