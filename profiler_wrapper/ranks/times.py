"""What each rank did itself in each step, and what it waited for others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from profiler_wrapper.ranks import model
from profiler_wrapper.ranks.database import Database, column, insert, to_arrays, to_rows
from profiler_wrapper.ranks.model import COMPUTE, Bool, Float, Int, SelfTimes
from profiler_wrapper.tables.statistics import median
from profiler_wrapper.trace.spans import sends_forward

# --------------------------------------------------------------------------------------------------
# Collectives, sends and receives of all ranks: who came last to each, who waited, what each name costs in all.
#
# A database has the tables (or views) `spans` and `ranks`, as trace/spans.py describes them. `prepare` adds:
#
# - `main_threads`: rank, thread: the one whose time is the step's.
# - `labels`: label, name, "group": a number for each communication in each group. A send and its receive are one.
# - `labels_of_names`: key, label, role (1 of a send, 2 of a receive, else 0), common (a number for each name, whatever
#   the group), forward: of each name in each group as spans have it.
# - `communications`: rank, step, label, sequence, start_ns, duration_ns, bytes, overlapped_ns.
# - `matched`: label, step, sequence of each collective that two ranks or more have, and each send with its receive;
#   size, shortest_ns, shorter_by_ns, shortest_rank.
#
# Rows are added up there, so that an answer has the size of ranks times steps, never that of the spans.

ON_MAIN = "(m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread)"  # span s, and m of main_threads
_SENDS = re.compile(r"(?i)(^|[^a-z])(i?)(send|recv|receive)(?![a-z])")


def prepare(database: Database) -> None:
    """Adds the tables that the answers are made from."""
    # The thread of a rank's steps; where there are none, that with the most time in spans.
    database.execute(
        """CREATE OR REPLACE TABLE main_threads AS
        SELECT rank, arg_max(thread, (steps, busy_ns, thread)) AS thread FROM (
            SELECT rank, thread, count(*) FILTER (kind = 'step') AS steps,
                coalesce(sum(duration_ns) FILTER (kind NOT IN ('step', 'communication') AND depth = 0), 0) AS busy_ns
            FROM spans WHERE step IS NOT NULL AND thread IS NOT NULL GROUP BY rank, thread) GROUP BY rank"""
    )
    names = database.execute(
        f"""SELECT {label_key("spans")} AS key, any_value(name), any_value("group") FROM spans
        WHERE kind = 'communication' AND step IS NOT NULL GROUP BY key ORDER BY 2, 3"""
    ).fetchall()
    labels: dict[tuple[str, str], int] = {}
    commons: dict[str, int] = {}
    rows = []
    for key, name, group in names:
        common, sends = common_name(name), _SENDS.search(name)
        label = labels.setdefault((common, group or ""), len(labels))
        role = 0 if sends is None else 1 if sends[3].lower() == "send" else 2
        rows.append(
            (key, label, common, group or "", role, commons.setdefault(common, len(commons)), sends_forward(name))
        )
    database.execute(
        """CREATE OR REPLACE TABLE labels_of_names (key UBIGINT, label INTEGER, name VARCHAR, "group" VARCHAR,
            role TINYINT, common INTEGER, forward BOOLEAN)"""
    )
    insert(database, "labels_of_names", rows)
    database.execute('CREATE OR REPLACE VIEW labels AS SELECT DISTINCT label, name, "group" FROM labels_of_names')
    database.execute(
        f"""CREATE OR REPLACE TABLE communications AS
        SELECT s.rank, s.step, l.label, s.sequence, s.start_ns, coalesce(s.device_ns, s.duration_ns) AS duration_ns,
            s.bytes, s.overlapped_ns
        FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")}
        WHERE s.kind = 'communication' AND s.step IS NOT NULL"""
    )
    database.execute(
        # A send within more than two ranks does not say to whom, nor one within two that both send and receive.
        # Ranks are sorted rather than gathered per collective: only a sort spills what does not fit.
        """CREATE OR REPLACE TABLE matched AS
        SELECT label, step, sequence, any_value(size) AS size, min(duration_ns) AS shortest_ns,
            avg(duration_ns) FILTER (place IN ((size + 1) // 2, size // 2 + 1)) - min(duration_ns) AS shorter_by_ns,
            min(rank) FILTER (place = 1) AS shortest_rank
        FROM (
            SELECT label, step, sequence, rank, duration_ns, count(*) OVER one AS size,
                row_number() OVER (one ORDER BY duration_ns, rank) AS place
            FROM communications ANTI JOIN (
                SELECT label FROM communications SEMI JOIN (SELECT label FROM labels_of_names WHERE role <> 0)
                USING (label) GROUP BY label HAVING count(DISTINCT rank) > 2) USING (label)
            ANTI JOIN (SELECT label, step, sequence FROM communications GROUP BY label, step, sequence, rank
                HAVING count(*) > 1) USING (label, step, sequence)
            WHERE sequence IS NOT NULL WINDOW one AS (PARTITION BY label, step, sequence))
        GROUP BY label, step, sequence HAVING count(*) > 1"""
    )


def label_key(table: str) -> str:
    """The expression of the key in `labels_of_names` of a span's name in its group."""
    return f"""hash({table}.name, coalesce({table}."group", ''))"""


def common_name(name: str) -> str:
    """What a send and the receive that it goes to have in common: `"forward-send"` -> `"forward-send/recv"`."""
    return _SENDS.sub(r"\1\2send/recv", name)


# --- collectives matched across ranks ---


def match_collectives(database: Database) -> model.Arrivals | None:
    """Match collectives across ranks by name, group, step and number: who came last to each.

    The shortest duration over the ranks of a collective is its transfer: who came last did not wait. Of a database
    that is prepared. None where no two ranks have a collective in common.
    """
    rows = to_arrays(database, "SELECT * FROM matched JOIN labels USING (label) ORDER BY step, label, sequence")
    if not len(rows["step"]):
        return None
    ranks = column(database, "SELECT DISTINCT rank FROM communications ORDER BY rank")
    shorter_by = rows["shorter_by_ns"]
    last = np.searchsorted(ranks, rows["shortest_rank"])
    return model.Arrivals(
        step=rows["step"].astype(np.int64),
        name=tuple(rows["name"].tolist()),
        shortest_rank=rows["shortest_rank"].astype(np.int64),
        shorter_by_ns=shorter_by,
        ranks=ranks,
        times_last=np.bincount(last[shorter_by > 0], minlength=len(ranks)),  # of ranks that came together, none did
        late_ns=np.asarray(np.bincount(last, weights=shorter_by, minlength=len(ranks)), dtype=np.float64),
    )


# --- what each costs ---


_NO_OVERLAP = "overlap: nothing tells what its rank computes beside it, or not of all of them"
_NO_BYTES = "bandwidth: nothing tells how many bytes were moved (traces of a CPU do with record_shapes alone)"
_NO_TRANSFER = "bandwidth: no two ranks tell of one of these, so its transfer cannot be told from waiting"


def communication(database: Database) -> tuple[model.CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first."""
    rows = to_rows(
        database,
        f"""SELECT l.name, l."group", c.ranks AS size, coalesce(m.instances, c.instances) AS instances,
            c.bytes // c.ranks AS bytes, c.time_ns, m.transfer_ns, c.time_ns - m.transfer_ns AS waiting_ns,
            c.overlapped_ns, CASE WHEN c.bytes > 0 AND m.transfer_ns > 0 THEN c.bytes * 1e9 / m.transfer_ns END
                AS bandwidth_bytes_per_s,
            concat_ws('; ', if(c.overlapped_ns IS NULL, '{_NO_OVERLAP}', NULL), if(bandwidth_bytes_per_s IS NULL,
                if(c.bytes IS NULL, '{_NO_BYTES}', '{_NO_TRANSFER}'), NULL)) AS unknown,
            l."group" = '' AND bool_or(l."group" <> '') OVER (PARTITION BY l.name) AS is_call
        FROM (SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                TRY_CAST(sum(bytes) AS BIGINT) AS bytes, sum(duration_ns)::BIGINT AS time_ns,
                CASE WHEN count(*) = count(overlapped_ns) THEN sum(overlapped_ns)::BIGINT END AS overlapped_ns
            FROM communications GROUP BY label) c
        JOIN labels l USING (label)
        LEFT JOIN (SELECT label, count(*) AS instances, sum(shortest_ns * size)::BIGINT AS transfer_ns
            FROM matched GROUP BY label) m USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """,
    )
    return tuple(model.CommunicationRow(**row) for row in rows)


# --- ranks that may be compared ---


def comparable(own: SelfTimes) -> list[Int]:
    """Places of the ranks of each stage, stage by stage."""
    return [np.flatnonzero(own.stages == stage) for stage in np.unique(own.stages)]


def largest(values: Float, axis: int = 0) -> Float:
    """The maximum of what is known; `nan` where nothing is."""
    return np.asarray(np.fmax.reduce(values, axis=axis, initial=np.nan), dtype=np.float64)


# --- waiting that no span shows ---


_LEFT_OF_HEAD_START = 0.5  # at most, where two ranks have waited for one another
_MAY_WAIT = ("forward", "backward", "communication", "optimizer", "other", model.BETWEEN)  # where ranks may wait


def subtract_estimated_waiting(own: SelfTimes) -> SelfTimes:
    """Estimate the wait inside phases where ranks synchronise, and subtract it.

    A rank that is ahead of the last one waits for it where they synchronise, and then has lost its head start: what a
    phase took it longer than the quickest rank is waiting, up to that head start, if the two end the phase together.
    Ranks need not all wait in the same phase: of DDP's broadcast of buffers, in the forward, some hear sooner than
    others.
    """
    times, waiting = own.self_ns.copy(), own.waiting_ns.copy()
    rest = [kind for kind in own.kinds if kind != "other"]
    for members in comparable(own):
        if len(members) < 2:
            continue
        # What no span covers may come last or first: the order counts that explains more, the first one of a tie.
        orders = (own.kinds, ("other", *rest))
        waited = max((_waited(own, members, order) for order in orders), key=lambda found: float(found.sum()))
        times[:, members] -= waited
        waiting[:, members] += waited.sum(axis=2)
    return replace(own, self_ns=times, waiting_ns=waiting)


def _waited(own: SelfTimes, members: Int, order: Sequence[str]) -> Float:
    """What each member waited in each phase of a step without its being measured, (S, M, K), in this order of them."""
    measured = np.nan_to_num(own.waiting_ns[:, members])
    waited = np.zeros((*measured.shape, len(own.kinds)))
    begin = np.zeros(measured.shape)  # of the phase, since that of the step
    for place in map(own.kinds.index, order):
        phase = own.self_ns[:, members, place]
        end = begin + phase
        if own.kinds[place] in _MAY_WAIT:
            last = np.where(np.isfinite(end), begin, -np.inf).argmax(axis=1)[:, None]
            ahead = np.take_along_axis(begin, last, 1) - begin
            apart = np.abs(np.take_along_axis(end, last, 1) - end)
            beyond = np.minimum(phase + largest(-phase, axis=1)[:, None], ahead - measured)  # the quickest rank's
            beyond = np.where(apart <= _LEFT_OF_HEAD_START * ahead, beyond, 0.0)
            waited[:, :, place] = np.clip(np.nan_to_num(beyond), 0.0, None)
        begin = end
    return waited


# --- steady steps ---


SOME_STEPS, MANY_STEPS = 5, 10  # for medium and high confidence
_WARM_UP = 1.5  # times the median of the steps after it


def steady_steps(own: SelfTimes) -> tuple[SelfTimes, list[str]]:
    """The steps that are analysed: known of half the ranks at least, warm-up left out. And what is left out."""
    known = np.asarray(np.isfinite(own.self_ns).all(axis=2))
    share = known.mean(axis=1)
    kept = np.flatnonzero((share > 0) & (share >= 0.5 * share.max(initial=0.0)))
    left_out = []
    if len(kept) < len(share):
        left_out.append(f"{len(share) - len(kept)} steps were not judged: too few ranks have them")
    longest = np.where(known, own.self_ns.sum(axis=2), -np.inf).max(axis=1, initial=-np.inf)[kept]
    warm_up, most = 0, min(3, len(longest) // 5, len(longest) - SOME_STEPS)
    while warm_up < most and longest[warm_up] > _WARM_UP * np.median(longest[warm_up + 1 :]):
        warm_up += 1
    if warm_up > 0 and longest[warm_up] > _WARM_UP * np.median(longest[warm_up + 1 :]):
        warm_up = 0  # the next one is as long: the job became quicker
    if warm_up:
        which = f"the first {warm_up} steps were" if warm_up > 1 else "the first step was"
        left_out.append(f"{which} left out as warm-up")
        kept = kept[warm_up:]
    by_step = {name: getattr(own, name)[kept] for name in ("steps", "self_ns", "waiting_ns", "wall_ns")}
    return replace(own, **by_step), left_out


def steady_times(own: SelfTimes) -> SelfTimes:
    """Self times in the steady steps, else in all; without waiting, also where it has to be estimated."""
    steady, _ = steady_steps(own)
    steady = steady if len(steady.steps) else own
    return steady if own.waiting_known else subtract_estimated_waiting(steady)


def with_waiting_of_one(own: SelfTimes) -> SelfTimes:
    """Of one rank a transfer cannot be told from waiting: all of its communication is self time."""
    if len(own.ranks) != 1:
        return own
    times = own.self_ns.copy()
    times[:, :, own.kinds.index("communication")] += own.waiting_ns
    return replace(own, self_ns=times, waiting_ns=np.where(np.isfinite(own.waiting_ns), 0.0, np.nan))


def waiting_source(own: SelfTimes) -> tuple[model.WaitingSource, str | None]:
    """How the waiting in the steady steps is known, and why it is not."""
    if len(own.ranks) == 1:
        return (
            "unknown",
            "one rank alone does not tell what it waited for others: that is in the time of its communication",
        )
    if own.waiting_known:
        return "measured", None
    if np.nansum(own.waiting_ns) > 0:
        return "estimated", None
    return "unknown", "no communication was recorded: phases may hold waiting"


# --- layers ---


def layer_times(database: Database, *, basis: model.Basis = "cpu") -> model.LayerTimes | None:
    """Each layer's time in a step of each rank, what is below it included; None where no span is of a layer.

    Adds the view `layer_steps`: rank, step, layer, kind (a place in COMPUTE), self_ns, first_ns.
    """
    own = "duration_ns - coalesce(waiting_ns, 0)"
    if basis == "device":
        own = f"coalesce(device_ns, {own})"
    database.execute(
        f"""CREATE OR REPLACE VIEW layer_steps AS
        SELECT rank, step, layer, list_position({list(COMPUTE)}, kind) - 1 AS kind, sum({own})::DOUBLE AS self_ns,
            min(start_ns) AS first_ns
        FROM spans WHERE layer IS NOT NULL AND step IS NOT NULL AND kind IN {COMPUTE} GROUP BY ALL"""
    )
    found = to_arrays(
        database,
        """WITH sums AS (SELECT rank, layer, kind, median(self_ns) AS self_ns, min(first_ns) AS first_ns
            FROM layer_steps GROUP BY ALL),
        in_order AS (SELECT layer, row_number() OVER (ORDER BY min(coalesce(r.stage, 0)), min(first_ns), layer) - 1
            AS place FROM sums LEFT JOIN ranks r USING (rank) GROUP BY layer)
        SELECT rank, layer, place, kind, self_ns FROM sums JOIN in_order USING (layer) ORDER BY place""",
    )
    if not len(found["rank"]):
        return None
    ranks, rank = np.unique(found["rank"], return_inverse=True)
    layers = tuple(dict.fromkeys(found["layer"].tolist()))
    times = np.full((len(ranks), len(layers), len(COMPUTE)), np.nan)
    times[rank, found["place"], found["kind"]] = found["self_ns"]
    return model.LayerTimes(ranks=ranks.astype(np.int64), layers=layers, kinds=COMPUTE, self_ns=times)


def layer_means(database: Database, ranks: Sequence[int], steps: Int) -> dict[tuple[int, str, str], float]:
    """The mean time a step, over these steps, of each layer and kind on these ranks: (rank, layer, kind) -> ns.

    After `layer_times`.
    """
    rows = database.execute(
        """SELECT rank, layer, kind, avg(self_ns) FROM layer_steps
        WHERE list_contains(?::INTEGER[], rank) AND list_contains(?::BIGINT[], step) GROUP BY ALL""",
        [list(ranks), steps.tolist()],
    ).fetchall()
    return {(rank, layer, COMPUTE[kind]): ns for rank, layer, kind, ns in rows}


# --- accounting ---


WAITING = "waiting"  # the last part: what the longest rank waited


def account(own: SelfTimes) -> model.Accounting:
    """The parts of every step of every stage. They add up to the longest time of a rank in it, waiting included."""
    stages = np.unique(own.stages)
    held, holder = np.empty((2, len(own.steps), len(stages), len(own.kinds) + 1), dtype=np.int64)
    parts = np.concatenate([own.self_ns, own.waiting_ns[:, :, None]], axis=2)
    known = np.isfinite(parts).all(axis=2)
    up_to = np.cumsum(np.rint(np.where(known[:, :, None], parts, 0.0)).astype(np.int64), axis=2)
    up_to[~known] = -1
    for place, members in enumerate(comparable(own)):
        times = up_to[:, members]
        most = times.max(axis=1)  # (S, K); -1: nobody has the step
        held[:, place] = np.diff(np.maximum(most, 0), axis=1, prepend=0)
        # Ranks that have all taken equally long have no slowest.
        equal = ((times == most[:, None]) | (times < 0)).all(axis=1) & (known[:, members].sum(axis=1) > 1)[:, None]
        holder[:, place] = np.where(equal | (most < 0), -1, own.ranks[members][times.argmax(axis=1)])
    return model.Accounting(
        stages=stages.astype(np.int64), steps=own.steps, kinds=(*own.kinds, WAITING), held_ns=held, holder=holder
    )


# --- scores ---


SLOW = 0.75  # a score under it
WINDOWS = 3  # so many in a row are flagged


def score(own: SelfTimes, *, window: int | None = None) -> model.Scores:
    """Scores over windows of `window` steps; by default a hundred windows at most, six at least where steps suffice."""
    steps = len(own.steps)
    width = window or max(1, min(10, steps // 6), -(-steps // 100))
    count = steps // width
    times = own.self_ns.sum(axis=2)[: count * width].reshape(count, width, len(own.ranks))
    typical = median(times, axis=1)  # (W, R)
    relative = np.full_like(typical, np.nan)
    for members in comparable(own):
        quickest = np.fmin.reduce(typical[:, members], axis=1)
        relative[:, members] = _ratio(quickest[:, None], typical[:, members])
    individual = _ratio(np.fmin.accumulate(typical, axis=0), typical)
    return model.Scores(
        window=width,
        first_steps=own.steps[: count * width : width],
        relative=relative,
        individual=individual,
        flagged_relative=_flagged(relative),
        flagged_individual=_flagged(individual),
    )


def _ratio(best: Float, now: Float) -> Float:
    """1 where both are 0; nan where not known."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(now == best, 1.0, best / now))


def _flagged(scores: Float) -> Bool:
    """Under SLOW in three windows in a row."""
    low = scores < SLOW  # nan is not
    runs = np.logical_and.reduce([low[at : len(low) - WINDOWS + 1 + at] for at in range(WINDOWS)])
    return np.asarray(runs.any(axis=0))


def typical(values: Float, axis: int) -> Float:
    """The median; of two the quicker, as only one of them can be slow."""
    least = np.fmin.reduce(values, axis=axis, initial=np.nan)
    return np.where(np.isfinite(values).sum(axis=axis) == 2, least, median(values, axis=axis))
