"""The noise of times: whether layers changed by more than it, known from a few steps on each side.

1. A layer's change is that of its median step, in logarithms, without what all layers of a step have in common.
2. Its noise is the typical distance between two of its steps, at least that of layers which take about as long; where
   the layers' changes scatter more than it explains, all noise is that much larger.
3. A change counts where it is over 2 %, over four standard errors, and nearly every step of one side is longer than
   nearly every step of the other; on a CPU also beside the rest of its step, as load slows down all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.statistics import MAD_TO_SIGMA

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

LEAST_CHANGE = 0.02  # a smaller one is no difference
STANDARD_ERRORS = 4.0  # with the rank test: no alarm in hundreds of layers (benchmarks/guard_alarms.py, test_noise.py)
ERRORS_OF_ONE = 3.0  # of a layer that does other work: that is one question, not one of hundreds
BUSY = 0.20  # on a CPU: where all is so much slower or faster, the machine is at other work
FEWEST_STEPS = 3  # of a side: fewer do not tell a held-up step from the others
LEAST_CHANGE_UNKNOWN = 0.25  # where a side has fewer
_UNSTEADY = 0.25  # spread: of a layer that varies more from step to step, nothing is said
_LEAST_REST = 0.1  # of a step: with less beside a layer, load cannot be told from the layer
_IN_FASTEST = 0.5  # of a change, on a CPU: so much of it the fastest steps must show, which load holds up least
_MOST_PAIRS = 0.8  # share of pairs of steps that one side wins, less those that it loses: more is not asked
_RANK_DEVIATIONS = 3.0  # of the rank sum: what is asked of many steps
_NEIGHBOURS = 15  # layers on each side in order of their time
_FEWEST_LAYERS = 8  # with fewer their scatter widens nothing
_PAIR_TO_SIGMA = 1.0483  # of a normal distribution: the median distance of two values is 0.9539 standard deviations
_MEDIAN_ERROR = 1.2533  # of a median, in standard errors of the mean (normal distribution)


@dataclass(frozen=True, slots=True, eq=False)
class Shifts:
    """How layers changed from one side to the other: logarithms of ratios, one per layer."""

    common: float  # of the typical layer
    common_error: float  # its standard error; infinite where noise is not known
    shift: Float  # of each
    error: Float  # standard error of `shift - common`
    spread: Float  # standard deviation of one step's own noise; nan where no side has two steps
    steady: Bool  # it varies little enough from step to step to be judged
    agreed: Bool  # the rank test does
    known: bool  # both sides have steps enough to know the noise

    @property
    def excess(self) -> Float:
        """What each changed beyond the common change."""
        return self.shift - self.common

    def beyond_noise(self) -> Bool:
        """Which layers changed otherwise than the typical one."""
        return (np.abs(self.excess) > limit(self.error, known=self.known)) & self.steady & self.agreed


def limit(error: Float | float, *, known: bool = True, errors: float = STANDARD_ERRORS) -> Float:
    """How large a change (a logarithm) may be and still be noise."""
    least = LEAST_CHANGE if known else LEAST_CHANGE_UNKNOWN
    return np.maximum(math.log1p(least), errors * np.asarray(error))


def layer_shifts(a: Float, b: Float, weight: Float) -> Shifts:
    """The shifts between two tables (layers, steps) of positive times; `weight` of each layer in what is common.

    Where a side has one step, noise is taken from the other side, and where neither has more, from how much the
    layers differ from one another: `known` is then false.
    """
    log_a, log_b = np.log(a), np.log(b)
    factor_a, factor_b = common_factors(log_a, weight), common_factors(log_b, weight)
    own_a, own_b = log_a - factor_a, log_b - factor_b
    shift = np.median(own_b, axis=1) - np.median(own_a, axis=1)
    common = weighted_median(shift, weight)
    scale = _error_scale(a.shape[1], b.shape[1])
    size = log_a.mean(axis=1) + log_b.mean(axis=1)
    spread = step_spread(own_a, own_b)
    if np.isnan(spread).any():
        error = MAD_TO_SIGMA * _of_neighbours(np.abs(shift - common), size)
    else:
        spread = np.maximum(spread, _of_neighbours(spread, size))
        error = spread * scale
        if len(shift) >= _FEWEST_LAYERS:
            scatter = np.abs(shift - common) / np.maximum(error, 1e-12)
            error = error * max(1.0, MAD_TO_SIGMA * weighted_median(scatter, weight))
    common_error = float(step_spread(factor_a[None, :], factor_b[None, :])[0]) * scale
    return Shifts(
        common=common,
        common_error=common_error if math.isfinite(common_error) else math.inf,
        shift=shift,
        error=error,
        spread=spread,
        steady=~((step_spread(own_a) > _UNSTEADY) | (step_spread(own_b) > _UNSTEADY)),
        agreed=_ranks_agree(own_a, own_b - common),
        known=min(a.shape[1], b.shape[1]) >= FEWEST_STEPS,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """How one series of times changed."""

    shift: float  # of the median step: a logarithm
    mean_error: float  # standard error of the relative change of the mean; nan where noise is not known
    beyond_noise: bool  # the median and the mean changed one way, the median by more than noise


NO_CHANGE = Change(0.0, math.nan, False)


def series_change(a: Float, b: Float, *, errors: float = STANDARD_ERRORS) -> Change:
    """The change between two series of positive numbers, by themselves."""
    if not ((a > 0).all() and (b > 0).all()):  # what took no time has no ratio
        return NO_CHANGE
    log_a, log_b = np.log(a)[None, :], np.log(b)[None, :]
    shift = float(np.median(log_b) - np.median(log_a))
    one_way = shift * (float(b.mean()) - float(a.mean())) > 0
    if min(len(a), len(b)) < FEWEST_STEPS:
        return Change(shift, math.nan, one_way and abs(shift) > float(limit(0.0, known=False)))
    far = abs(shift) > float(limit(step_spread(log_a, log_b)[0] * _error_scale(len(a), len(b)), errors=errors))
    mean_error = math.sqrt(sum(float(side.var(ddof=1)) / len(side) / float(side.mean()) ** 2 for side in (a, b)))
    return Change(shift, mean_error, one_way and far and bool(_ranks_agree(log_a, log_b)[0]))


def beside_the_rest(a: Float, b: Float, step_a: Float, step_b: Float, *, errors: float = STANDARD_ERRORS) -> float:
    """The change of a layer (a logarithm) beside the rest of its step: 0 where that is noise, or may be load.

    Load takes more from what is long than from the rest, so that what all changed by must be less.
    """
    rest_a, rest_b = (np.maximum(step - own, _LEAST_REST * step) for step, own in ((step_a, a), (step_b, b)))
    beside = series_change(a / rest_a, b / rest_b, errors=errors)  # what holds up both cancels, step by step
    rest = float(np.median(np.log(rest_b)) - np.median(np.log(rest_a)))
    if not beside.beyond_noise or (abs(math.expm1(rest)) > BUSY and abs(beside.shift) <= abs(rest)):
        return 0.0
    fastest = math.log(b.min() / a.min()) - math.log(rest_b.min() / rest_a.min())
    return beside.shift if fastest / beside.shift >= _IN_FASTEST else 0.0


def step_spread(*sides: Float) -> Float:
    """Standard deviation of one step of each layer, of logarithms: from the distance of every two steps of a side.

    The median distance leaves out a step that was held up, also of as few as four; the mean square of both sides has
    what only one side varies by. Nan where no side has two steps.
    """
    squares = []
    for side in sides:
        one, other = np.triu_indices(side.shape[1], 1)
        if len(one):
            squares.append((_PAIR_TO_SIGMA * np.median(np.abs(side[:, one] - side[:, other]), axis=1)) ** 2)
    return np.sqrt(np.mean(squares, axis=0)) if squares else np.full(len(sides[0]), np.nan)


def common_factors(logs: Float, weight: Float) -> Float:
    """What each step has in common over all layers: logarithms, 0 in the median step."""
    apart = logs - np.median(logs, axis=1, keepdims=True)
    return np.array([weighted_median(apart[:, step], weight) for step in range(logs.shape[1])])


def weighted_median(values: Float, weight: Float) -> float:
    """The value at half of the weight; 0 of nothing."""
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    place = int(np.searchsorted(reached, reached[-1] / 2))
    return float(values[order][min(place, len(values) - 1)])


def _error_scale(steps_a: int, steps_b: int) -> float:
    """The standard error of a difference of medians, in standard deviations of a step."""
    return math.sqrt(sum((1.0 if steps == 1 else _MEDIAN_ERROR) ** 2 / steps for steps in (steps_a, steps_b)))


def _ranks_agree(a: Float, b: Float) -> Bool:
    """Mann and Whitney's rank test of each row; of few steps, 0.8: nine of ten pairs go one way. True of one step."""
    m, n = a.shape[1], b.shape[1]
    if min(m, n) < FEWEST_STEPS:
        return np.ones(len(a), dtype=np.bool_)
    enough = min(_MOST_PAIRS, _RANK_DEVIATIONS * math.sqrt((m + n + 1) / (3 * m * n)))
    # Over all pairs of a step of `a` and one of `b`: the share in which `b` is more, less that in which it is less.
    won = np.sign(b[:, None, :] - a[:, :, None]).mean(axis=(1, 2))
    return np.asarray(np.abs(won) >= enough, dtype=np.bool_)


def _of_neighbours(values: Float, size: Float) -> Float:
    """The median of each among its neighbours in order of size."""
    order = np.argsort(size, kind="stable")
    ordered = values[order]
    first = np.clip(np.arange(len(values)) - _NEIGHBOURS, 0, max(0, len(values) - 2 * _NEIGHBOURS - 1))
    window = min(len(values), 2 * _NEIGHBOURS + 1)
    near = np.empty_like(values)
    near[order] = np.median(ordered[first[:, None] + np.arange(window)], axis=1)
    return near
