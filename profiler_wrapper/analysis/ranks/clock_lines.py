"""A clock against another one: straight lines, by pieces where it was set or its rate changed."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

LEAST_JUMP_NS: Final = 100e3  # what is less looks like jitter
NEAR: Final = 5  # events on either side of a jump that show it
LEAST_FOR_JUMPS: Final = 4 * NEAR  # events
ON_THEIR_SIDE: Final = 0.85  # of the events before and after a jump
LEAST_FOR_KINKS: Final = 24
BETTER: Final = 0.7  # what two lines must leave of one line's errors, to be believed
LEAST_BEND_NS: Final = 100.0  # errors that are worth a second line
STRAY: Final = 1.2  # errors from a bent line are greater than from one event to the next
MOST_PIECES: Final = 8
MOST_DRIFT: Final = 1e-3  # no clock is as wrong


class Line(NamedTuple):
    """ahead = offset + drift * (own - reference), from an own time on."""

    from_ns: float
    reference_ns: float
    offset_ns: float
    drift: float

    def ahead(self, own: Float) -> Float:
        """How far the clock is ahead at own times, in ns."""
        return self.offset_ns + self.drift * (own - self.reference_ns)


def fit_lines(own: Float, ahead: Float) -> list[Line]:
    """Lines through how far a clock is ahead, by its own times, in the order of events; robust to late readings.

    Where a clock was set back it shows the same times twice; they go by the later piece.
    """
    pieces = [
        part
        for between in _split_at_jumps(own, ahead, np.arange(len(own)))
        for part in _split_at_kinks(own, ahead, between)
    ]
    lines: list[Line] = []
    last = -np.inf
    for part in sorted(pieces[:MOST_PIECES], key=lambda part: float(own[part].mean())):
        line = Line(-np.inf, *straight(own[part], ahead[part]))
        lines.append(line._replace(from_ns=_begin(lines[-1], line, last, float(own[part].min()))) if lines else line)
        last = float(own[part].max())
    return lines


def _begin(before: Line, after: Line, last: float, first: float) -> float:
    """When the second line takes over: where they meet between two events, else with the event after."""
    if before.drift != after.drift:
        apart = after.ahead(np.array([last]))[0] - before.ahead(np.array([last]))[0]
        meet = last + float(apart) / (before.drift - after.drift)
        if last <= meet <= first:
            return meet
    return float(first)


def through(first: Line, second: Line) -> Line:
    """A clock by a third one: `first` is it by another's time, `second` this other by the third's."""
    met = first.reference_ns - first.offset_ns
    ahead = float(second.ahead(np.array([met]))[0])
    return first._replace(offset_ns=first.offset_ns + ahead, drift=first.drift + second.drift * (1 - first.drift))


def ahead_by(lines: list[Line], own: Float) -> Float:
    """How far the clock is ahead at own times, in ns."""
    piece = np.searchsorted([line.from_ns for line in lines[1:]], own, side="right")
    table = np.array(lines)[piece]
    return np.asarray(table[..., 2] + table[..., 3] * (own - table[..., 1]))


def median(values: Float) -> float:
    """As numpy's, which takes ten times as long for a few numbers."""
    ordered = np.sort(values)
    count = len(ordered)
    return float(ordered[count // 2] + ordered[(count - 1) // 2]) / 2


def straight(own: Float, ahead: Float) -> tuple[float, float, float]:
    """Reference time, offset there, drift. The drift is 0 where the readings do not tell it from 0.

    The median of slopes between events half the time apart, then least squares without what is far off.
    """
    count = len(own)
    reference = float(own.sum()) / count
    time = own - reference
    half = count // 2
    drift = 0.0
    if half >= 2 and time[-1] > time[0]:
        apart = time[-half:] - time[:half]
        slopes = (ahead[-half:] - ahead[:half])[apart > 0] / apart[apart > 0]
        drift = median(slopes) if len(slopes) else 0.0
    offset = median(ahead - drift * time)
    near = _near(ahead - drift * time - offset)
    if near.sum() >= 4:
        time, value = time[near], ahead[near]
        middle = float(time.sum()) / len(time)
        weight = time - middle
        spread = float(weight @ weight)
        if spread > 0:
            drift = float(weight @ value) / spread
            offset = float(value.sum()) / len(time) - drift * middle
            errors = value - offset - drift * time
            error = (float(errors @ errors) / len(time) / spread) ** 0.5
            if abs(drift) < 3 * error or abs(drift) > MOST_DRIFT:
                drift, offset = 0.0, median(ahead)
    elif count < 4 or abs(drift) > MOST_DRIFT:
        drift, offset = 0.0, median(ahead)
    return reference, offset, drift


def _near(error: Float) -> npt.NDArray[np.bool_]:
    size = np.abs(error)
    return np.asarray(size <= max(1.0, 3 * 1.4826 * median(size)))


def _split_at_jumps(own: Float, ahead: Float, part: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Where the clock was set: the events after differ from those before by far more than these do from one another."""
    if len(part) < LEAST_FOR_JUMPS:
        return [part]
    time, value = own[part], ahead[part]
    near, lag = NEAR, 3
    apart = time[lag:] - time[:-lag]
    slopes = (value[lag:] - value[:-lag])[apart > 0] / apart[apart > 0]
    flat = value - (median(slopes) if len(slopes) else 0.0) * (time - time[0])
    windows = np.median(np.lib.stride_tricks.sliding_window_view(flat, near), axis=1)
    change = np.abs(windows[near:] - windows[:-near])  # of a cut before event `near + index`
    noise = 1.4826 * median(np.abs(np.diff(flat))) / 2**0.5
    if not len(change) or change.max() <= max(6 * noise, LEAST_JUMP_NS):
        return [part]
    best = np.flatnonzero(change >= 0.8 * change.max()) + near
    cut = int(best[np.abs(np.diff(flat))[best - 1].argmax()])
    if not _is_jump(time, flat, cut, max(0.5 * float(change.max()), 6 * noise, LEAST_JUMP_NS)):
        return [part]
    return _split_at_jumps(own, ahead, part[:cut]) + _split_at_jumps(own, ahead, part[cut:])


def _is_jump(time: Float, flat: Float, cut: int, least: float) -> bool:
    """Whether lines through the events before and after are far apart at the cut, and each event on its own side."""
    before, after = slice(max(0, cut - 3 * NEAR), cut), slice(cut, cut + 3 * NEAR)
    at = (time[cut - 1] + time[cut]) / 2
    levels = []
    for side in (before, after):
        reference, offset, drift = straight(time[side], flat[side])
        levels.append(offset + drift * (at - reference))
    between, upwards = sum(levels) / 2, levels[1] > levels[0]
    right = ((flat[after] > between) == upwards).mean(), ((flat[before] < between) == upwards).mean()
    return bool(abs(levels[1] - levels[0]) >= least and min(right) >= ON_THEIR_SIDE)


def _split_at_kinks(own: Float, ahead: Float, part: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Where its rate changed, as when a time service slows it down."""
    if len(part) < LEAST_FOR_KINKS:
        return [part]
    errors = _errors(own[part], ahead[part])
    whole = np.abs(errors)
    if median(whole) <= max(
        LEAST_BEND_NS, STRAY * median(np.abs(np.diff(errors)))
    ):  # no more from the line than from one to the next
        return [part]
    most = 3 * median(whole)  # what a reading far off counts

    def left(cut: int) -> float:
        halves = (_errors(own[half], ahead[half]) for half in (part[:cut], part[cut:]))
        return float(sum(np.minimum(most, np.abs(errors)).sum() for errors in halves))

    count = len(part)
    at = min((count * eighth // 8 for eighth in range(2, 7)), key=left)
    if left(at) >= BETTER * np.minimum(most, whole).sum():
        return [part]
    step = max(1, count // 64)
    at = min(range(max(4, at - count // 8), min(count - 4, at + count // 8) + 1, step), key=left)
    return _split_at_kinks(own, ahead, part[:at]) + _split_at_kinks(own, ahead, part[at:])


def _errors(own: Float, ahead: Float) -> Float:
    reference, offset, drift = straight(own, ahead)
    return np.asarray(ahead - offset - drift * (own - reference))
