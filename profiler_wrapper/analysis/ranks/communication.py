"""Collectives, sends and receives: who came last to each and who waited, and what each name costs in all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler_wrapper.analysis.ranks.arrays import Database
from profiler_wrapper.analysis.ranks.meetings import Meetings, meet
from profiler_wrapper.analysis.ranks.model import Arrivals, CommunicationRow
from profiler_wrapper.analysis.ranks.overlap import overlapped_ns


def arrivals(database: Database, *, meetings: Meetings | None = None) -> Arrivals | None:
    """Who came last to each collective, and who waited; None where no two ranks tell of one."""
    meetings = meet(database) if meetings is None else meetings
    if not len(meetings.step):
        return None
    rows = database.execute('SELECT label, name, "group" FROM labels').fetchall()
    named = {label: (name, group) for label, name, group in rows}
    names = [named[label] for label in meetings.label.tolist()]
    order = np.lexsort((meetings.sequence, meetings.label, meetings.step))
    return Arrivals(
        step=meetings.step[order],
        group=tuple(names[i][1] for i in order.tolist()),
        name=tuple(names[i][0] for i in order.tolist()),
        sequence=meetings.sequence[order],
        size=meetings.size[order],
        first_rank=meetings.first_rank[order],
        last_rank=meetings.last_rank[order],
        lateness_ns=meetings.lateness_ns[order],
        shortest_rank=meetings.shortest_rank[order],
        shorter_by_ns=(meetings.median_ns - meetings.shortest_ns)[order],
        transfer_ns=meetings.shortest_ns[order],
        waiting_ns=(meetings.total_ns - meetings.shortest_ns * meetings.size)[order],
        ranks=meetings.ranks,
        times_last=meetings.times_last,
        late_ns=meetings.late_ns,
        rank_waiting_ns=meetings.waiting_ns,
    )


def communication(database: Database, *, meetings: Meetings | None = None) -> tuple[CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first."""
    meetings = meet(database) if meetings is None else meetings
    rows = database.execute(
        """SELECT c.label, l.name, l."group", c.ranks, c.instances, c.time_ns, b.bytes FROM (
            SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                sum(duration_ns)::BIGINT AS time_ns FROM communications GROUP BY label) c
        JOIN labels l USING (label) LEFT JOIN label_bytes b USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """
    ).fetchall()
    transfers = np.bincount(meetings.label, weights=meetings.shortest_ns * meetings.size, minlength=1)
    counts = np.bincount(meetings.label, minlength=1)
    hidden = overlapped_ns(database)
    found = []
    for label, name, group, ranks, instances, time_ns, moved in rows:
        met = label < len(counts) and counts[label] > 0
        transfer_ns = int(transfers[label]) if met else None
        of_one_rank = None if moved is None else moved // ranks
        bandwidth = moved * 1e9 / transfer_ns if moved and transfer_ns else None
        found.append(
            CommunicationRow(
                name=name,
                group=group,
                size=ranks,
                instances=int(counts[label]) if met else instances,
                bytes=of_one_rank,
                time_ns=time_ns,
                transfer_ns=transfer_ns,
                waiting_ns=None if transfer_ns is None else time_ns - transfer_ns,
                overlapped_ns=hidden.get(label),
                bandwidth_bytes_per_s=bandwidth,
            )
        )
    return tuple(found)


def is_call(row: CommunicationRow, rows: Sequence[CommunicationRow]) -> bool:
    """Whether a row is what the calling thread takes to start collectives that another row has, of the backend's."""
    return not row.group and any(other.group and other.name == row.name for other in rows)
