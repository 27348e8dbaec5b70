"""Accounts of jobs: of rows by hand, and of simulated jobs without files between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from profiler_wrapper.ranks.account import KINDS, Account, read_account
from profiler_wrapper.ranks.clocks import fit
from profiler_wrapper.ranks.database import Database, open_database
from profiler_wrapper.ranks.model import Basis, SelfTimes
from profiler_wrapper.ranks.times import prepare
from profiler_wrapper.trace.spans import RANK_COLUMNS, SPAN_COLUMNS
from rank_causes import Job
from rank_job_files import Recording, plain_recording, spans
from span_tables import span, span_database

MS = 1_000_000


def row(rank: int, step: int | None, kind: str, begin_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    """A span from and to these milliseconds."""
    return span(rank, step, kind, round(begin_ms * MS), round((end_ms - begin_ms) * MS), **more)


def meet(rank: int, step: int, begin_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    """A rank's span of the first all-reduce of a step, if nothing else is said."""
    about = {"name": "all_reduce", "group": "world", "sequence": 0, **more}
    return row(rank, step, "communication", begin_ms, end_ms, **about)


def account_of(rows: Iterable[Mapping[str, Any]], **how: Any) -> Account:
    """The account of spans by hand, all by one clock."""
    with span_database(rows) as database:
        prepare(database)
        return read_account(database, None, **how)


def account_of_job(job: Job, recording: Recording | None = None, *, with_clocks: bool = False) -> Account:
    """The account of a simulated job."""
    recording = recording or plain_recording(job)
    table = spans(job, recording)
    with open_database(memory_bytes=200 << 20, threads=1) as database:
        database.register("found", table)
        for name, columns in (("spans", SPAN_COLUMNS), ("ranks", RANK_COLUMNS)):
            chosen = ", ".join(
                f'{f"{chr(34)}{one}{chr(34)}" if one in table.column_names else "NULL"}::{kind} AS "{one}"'
                for one, (kind, _) in columns.items()
            )
            database.execute(f"CREATE TABLE {name} AS SELECT DISTINCT {chosen} FROM found")
        prepare(database)
        return read_account(database, fit(database) if with_clocks else None)


def own_ms(account: Account, rank: int = 0, step: int = 0) -> dict[str, float]:
    """The kinds that took a rank time in a step, and its waiting; places, not numbers."""
    own = {kind: float(account.own_ns[step, rank, place]) / MS for place, kind in enumerate(KINDS)}
    return {kind: value for kind, value in own.items() if value} | {
        "waiting": float(account.waiting_ns[step, rank]) / MS
    }


def adds_up(account: Account) -> None:
    """What a rank did in a step and what it waited is the step; where its clock jumps, to how far is known."""
    in_step = account.own_ns[:, :, :-1].sum(axis=2) + account.waiting_ns
    known = np.isfinite(account.wall_ns)
    assert np.array_equal(np.isfinite(in_step), known)
    most = np.where(np.isin(account.ranks, account.jumped), 0.05 * MS, 1.0)
    assert (np.abs(in_step - account.wall_ns) < most)[known].all()
    assert account.own_ns[known].min(initial=0.0) >= 0
    assert account.waiting_ns[known].min(initial=0.0) >= 0


def own_times(database: Database, *, basis: Basis = "cpu") -> SelfTimes:
    """What each rank did itself, of a database that is prepared; the stage of a rank is 0 where no table has it."""
    account = read_account(database, None, on_device=basis == "device")
    found = dict(database.execute("SELECT rank, coalesce(stage, 0) FROM ranks").fetchall())
    stages = np.array([found.get(rank, 0) for rank in account.ranks.tolist()], dtype=np.int64)
    return account.self_times(stages, basis=basis)
