"""One account of a job, against answers by hand: what ranks did, and what they waited for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.account import ENDS, KINDS, LAUNCHES, MEETS, WAITS, Account, sync_each_step
from rank_accounts import MS, account_of, account_of_job, adds_up, meet, own_ms, row
from rank_causes import make_job
from rank_job_files import make_recording, plain_recording
from rank_layouts import LAYOUTS


def kinds_of_points(account: Account, rank: int = 0) -> list[int]:
    return account.points.kind[account.points.rank == rank].tolist()


# --- syncs on the main thread ---


def late_rank() -> list[dict[str, Any]]:
    """Three ranks compute for 40, 42 and 90 ms, and leave an all-reduce of 10 ms together."""
    return [
        one
        for rank, compute in enumerate((40, 42, 90))
        for one in (
            row(rank, 0, "step", 0, 105),
            row(rank, 0, "forward", 0, compute),
            meet(rank, 0, compute, 100),
            row(rank, 0, "optimizer", 100, 105),
        )
    ]


def test_who_comes_early_waits_and_the_transfer_is_as_long_for_all() -> None:
    account = account_of(late_rank())
    assert [own_ms(account, rank) for rank in range(3)] == [
        {"forward": 40, "communication": 10, "optimizer": 5, "waiting": 50},
        {"forward": 42, "communication": 10, "optimizer": 5, "waiting": 48},
        {"forward": 90, "communication": 10, "optimizer": 5, "waiting": 0},
    ]
    assert kinds_of_points(account) == [MEETS, ENDS]
    syncs = account.syncs
    assert syncs.transfer_ns.tolist() == [10 * MS] * 3 and syncs.waits.all() and syncs.on_main.all()
    assert syncs.begin_ns.tolist() == [50 * MS], "since the first arrival"


def test_what_a_rank_did_before_each_point() -> None:
    account = account_of(late_rank())
    work = account.work
    found = {
        (int(account.points.rank[point]), int(account.points.kind[point]), KINDS[kind]): ns / MS
        for point, kind, ns in zip(work.point, work.kind, work.ns, strict=True)
    }
    computes = {(rank, MEETS, "forward"): length for rank, length in enumerate((40.0, 42.0, 90.0))}
    assert found == computes | {(rank, ENDS, "optimizer"): 5.0 for rank in range(3)}


def test_a_meeting_within_a_phase_is_taken_out_of_it() -> None:
    """Forward of 50 and of 70 ms, in it an all-reduce of 20 ms to which the second rank comes 20 ms later."""
    rows = []
    for rank, late in enumerate((0, 20)):
        rows += [
            row(rank, 0, "step", 0, 80),
            row(rank, 0, "forward", 0, 75),
            meet(rank, 0, 20 + late, 60, depth=1, parent="forward"),
        ]
    account = account_of(rows)
    assert own_ms(account, 0) == {"forward": 35, "communication": 20, "other": 5, "waiting": 20}
    assert own_ms(account, 1) == {"forward": 55, "communication": 20, "other": 5, "waiting": 0}


def test_groups_and_numbers_are_meetings_of_their_own() -> None:
    rows = [
        meet(0, 0, 0, 9, group="0-1"),
        meet(1, 0, 5, 9, group="0-1"),
        meet(2, 0, 0, 20, group="2-3"),
        meet(3, 0, 6, 20, group="2-3"),
        meet(0, 0, 50, 53, group="0-1", sequence=1),
        meet(1, 0, 50, 53, group="0-1", sequence=1),
    ]
    account = account_of(rows)
    assert len(account.syncs.label) == 3
    assert [own_ms(account, rank)["waiting"] for rank in range(4)] == [5, 0, 6, 0]
    assert [own_ms(account, rank)["communication"] for rank in range(4)] == [7, 7, 14, 14]


def test_a_send_that_nobody_waits_for_is_no_meeting_of_its_sender() -> None:
    """Sends of 1 ms, however late the receiver is; who comes early gets it 4 ms after it was sent."""
    rows = []
    for step, (sent, asked) in enumerate(((20, 80), (20, 70), (20, 50), (70, 20), (70, 30), (60, 10))):
        begin, got = 100 * step, max(asked, sent) + 4
        rows += [
            row(0, step, "step", begin, begin + 90),
            row(0, step, "forward", begin, begin + sent),
            meet(0, step, begin + sent, begin + sent + 1, name="send", group="0-1"),
            row(1, step, "step", begin, begin + 90),
            row(1, step, "data", begin, begin + asked),
            meet(1, step, begin + asked, begin + got, name="recv", group="0-1"),
        ]
    account = account_of(rows)
    syncs = account.syncs
    assert syncs.waits[syncs.rank == 1].all() and not syncs.waits[syncs.rank == 0].any()
    assert kinds_of_points(account, 0) == [LAUNCHES] * 6 + [ENDS]
    assert [own_ms(account, 1, step)["waiting"] for step in range(6)] == [0, 0, 0, 50, 40, 50]
    assert [own_ms(account, 1, step)["communication"] for step in range(6)] == [4] * 6
    assert [own_ms(account, 0, step)["waiting"] for step in range(6)] == [0] * 6


def test_members_meet_though_a_busy_machine_shows_the_last_one_late() -> None:
    """In half of the steps the others have left when rank 2, which came last, is seen to wait."""
    rows = []
    for step, (came, seen) in enumerate(((22, 26), (24, 25), (23, 28), (25, 26), (22, 29), (160, 160))):
        begin = 200 * step
        for rank in range(3):
            start, end = (seen, seen + 0.1) if rank == 2 else (20, came + 1)
            rows += [
                row(rank, step, "step", begin, begin + 200),
                row(rank, step, "forward", begin, begin + start),
                meet(rank, step, begin + start, begin + end, name="all_to_all"),
                meet(rank, step, begin + 190, begin + 191),
            ]
    account = account_of(rows)
    assert account.syncs.waits.all()
    assert [round(own_ms(account, 0, step)["waiting"]) for step in range(6)] == [3, 5, 4, 6, 3, 141]


# --- communication beside the main thread ---


def beside(backwards: tuple[int, int]) -> Account:
    """Two ranks reduce on a stream while they compute backward: from 30 and 50 to 90 ms, then the optimizer."""
    rows = []
    for rank, (backward, begin) in enumerate(zip(backwards, (30, 50), strict=True)):
        rows += [
            row(rank, 0, "step", 0, 100),
            row(rank, 0, "backward", 0, backward),
            meet(rank, 0, begin, 90, thread=2),
            row(rank, 0, "optimizer", 90, 100),
        ]
    return account_of(rows)


def test_communication_beside_the_main_thread_counts_where_it_idles() -> None:
    account = beside((60, 80))
    assert own_ms(account, 0) == {"backward": 60, "communication": 30, "optimizer": 10, "waiting": 0}
    assert own_ms(account, 1) == {"backward": 80, "communication": 10, "optimizer": 10, "waiting": 0}
    assert kinds_of_points(account) == [LAUNCHES, WAITS, ENDS]


def test_what_it_idles_beyond_the_transfer_is_waiting() -> None:
    """The last one comes at 50: of the first one's idle 50 ms the transfer takes 40."""
    account = beside((40, 80))
    assert own_ms(account, 0) == {"backward": 40, "communication": 40, "optimizer": 10, "waiting": 10}


def test_what_computing_hides_costs_nothing() -> None:
    account = beside((90, 90))
    assert [own_ms(account, rank) for rank in (0, 1)] == [{"backward": 90, "optimizer": 10, "waiting": 0}] * 2
    assert kinds_of_points(account) == [LAUNCHES, ENDS]


def test_a_thread_that_goes_on_before_a_communication_ends_did_not_wait_for_it() -> None:
    """It idles from 60 to 70 while the all-reduce runs until 90."""
    rows = []
    for rank in (0, 1):
        rows += [
            row(rank, 0, "step", 0, 100),
            row(rank, 0, "backward", 0, 60),
            meet(rank, 0, 30, 90, thread=2),
            row(rank, 0, "optimizer", 70, 100),
        ]
    account = account_of(rows)
    assert own_ms(account) == {"backward": 60, "other": 10, "optimizer": 30, "waiting": 0}


def test_a_phase_waits_between_its_layers() -> None:
    """A forward of 100 ms whose second layer begins when a gather ends at 60, 40 ms after the first layer."""
    rows = []
    for rank in (0, 1):
        rows += [
            row(rank, 0, "step", 0, 100),
            row(rank, 0, "forward", 0, 100),
            row(rank, 0, "forward", 0, 20, depth=1, layer="blocks.0", parent="forward"),
            row(rank, 0, "forward", 60, 100, depth=1, layer="blocks.1", parent="forward"),
            meet(rank, 0, 10, 60, thread=2, name="all_gather"),
        ]
    account = account_of(rows)
    assert own_ms(account) == {"forward": 60, "communication": 40, "waiting": 0}
    assert kinds_of_points(account) == [LAUNCHES, WAITS, ENDS]
    without_layers = account_of([one for one in rows if one["depth"] == 0])
    assert own_ms(without_layers) == {"forward": 100, "waiting": 0}, "nothing tells where it waits"


def test_work_beside_the_main_thread_is_no_time_of_the_step_but_is_seen() -> None:
    rows = []
    for step in range(3):
        rows += [
            row(0, step, "step", 100 * step, 100 * step + 90),
            row(0, step, "forward", 100 * step, 100 * step + 90),
        ]
    rows.append(row(0, 0, "checkpoint", 40, 150, thread=3))
    account = account_of(rows)
    assert own_ms(account, step=1) == {"forward": 90, "between steps": 10, "waiting": 0}
    assert account.beside[:, 0].tolist() == [True, True, False], "in most of a step"


# --- what nobody else tells of ---


def test_to_idle_for_a_communication_of_which_nobody_else_tells_is_communication() -> None:
    """A receive whose sender is not recorded in this step: rank 0 idles from 50 to 80, then 5 ms for its own reason."""
    rows = [row(0, 0, "step", 0, 100), row(0, 0, "forward", 0, 50), row(0, 0, "backward", 85, 100)]
    rows.append(meet(0, 0, 20, 80, name="forward-recv", group="0-1", thread=2))
    rows += [row(rank, 1, "step", 100, 160) for rank in (0, 1)]
    rows += [
        meet(rank, 1, 110, 150, name=f"forward-{way}", group="0-1", thread=2)
        for rank, way in enumerate(("recv", "send"))
    ]
    account = account_of(rows)
    assert own_ms(account) == {"forward": 50, "communication": 30, "other": 5, "backward": 15, "waiting": 0}


def test_a_thread_that_launches_as_what_it_waited_for_ends_waited_for_it() -> None:
    """At 30 ms the first all-reduce ends and the second, of another thread, begins: the rank waited in between."""
    rows = []
    for rank, forward in enumerate((10, 20)):
        rows += [row(rank, 0, "step", 0, 40), row(rank, 0, "forward", 0, forward)]
        rows += [meet(rank, 0, forward, 30, thread=2), meet(rank, 0, 30, 40, name="all_gather", thread=3)]
    account = account_of(rows)
    for rank in (0, 1):
        assert kinds_of_points(account, rank) == [LAUNCHES, WAITS, LAUNCHES, WAITS, ENDS]
    assert [own_ms(account, rank)["waiting"] for rank in (0, 1)] == [10, 0]


def test_of_an_unmatched_communication_the_quickest_is_its_transfer() -> None:
    rows = []
    for step, lasts in enumerate((10, 30, 14)):
        for rank in (0, 1):
            begin = 100 * step
            rows += [
                row(rank, step, "step", begin, begin + 90),
                row(rank, step, "forward", begin, begin + 50),
                meet(rank, step, begin + 50, begin + 50 + lasts, group=f"of {rank}"),
            ]
    account = account_of(rows)
    assert [own_ms(account, 1, step)["communication"] for step in range(3)] == [10, 10, 10]
    assert [own_ms(account, 1, step)["waiting"] for step in range(3)] == [0, 20, 4]
    assert not len(account.syncs.label)
    adds_up(account)


def test_without_any_communication_all_meet_at_the_end_of_each_step() -> None:
    rows = []
    for rank, forward in enumerate((30, 50)):
        for step in (0, 1):
            begin = 60 * step
            rows += [
                row(rank, step, "step", begin, begin + 60),
                row(rank, step, "forward", begin, begin + forward),
            ]
    account = account_of(rows)
    found = sync_each_step(account, np.where(np.array(KINDS) == "forward", account.own_ns, 0.0))
    assert found.syncs.step.tolist() == [0, 1]
    assert (found.syncs.begin_ns / MS).tolist() == [20, 70], "30 ms after the first arrival is 0"
    assert [kinds_of_points(found, rank) for rank in (0, 1)] == [[MEETS, MEETS, ENDS]] * 2
    assert (found.work.ns / MS).tolist() == [30, 30, 50, 50]


# --- steps ---


def test_what_lies_between_steps_is_a_kind_of_its_own() -> None:
    rows = [
        row(0, 0, "step", 0, 50),
        row(0, 0, "forward", 0, 45),
        row(0, 1, "step", 70, 120),
        row(0, 1, "forward", 70, 120),
    ]
    account = account_of(rows)
    assert own_ms(account) == {"forward": 45, "other": 5, "between steps": 20, "waiting": 0}
    assert own_ms(account, step=1) == {"forward": 50, "waiting": 0}
    assert account.wall_ns[:, 0].tolist() == [50 * MS, 50 * MS]


def test_a_rank_without_a_step_is_not_known_there() -> None:
    rows = [row(0, step, kind, 100 * step, 100 * step + 80) for step in range(3) for kind in ("step", "forward")]
    rows += [row(1, 0, kind, 0, 80) for kind in ("step", "forward")]
    account = account_of(rows)
    assert np.isnan(account.wall_ns).tolist() == [[False, False], [False, True], [False, True]]
    assert np.isnan(account.own_ns[1, 1]).all() and np.isnan(account.waiting_ns[1, 1])
    adds_up(account)


def test_without_spans_of_steps_a_step_is_from_its_first_span_to_its_last() -> None:
    rows = [row(0, 0, "forward", 10, 30), row(0, 0, "backward", 40, 50)]
    assert own_ms(account_of(rows)) == {"forward": 20, "backward": 10, "other": 10, "waiting": 0}


# --- times of a device ---


def test_times_of_a_device_are_laid_end_to_end() -> None:
    """Launched in 8 ms, which the device takes 25 and 45 ms for; both end an all-reduce of 10 ms together."""
    rows = []
    for rank, forward in enumerate((25, 45)):
        rows += [
            row(rank, 0, "step", 0, 70),
            row(rank, 0, "data", 0, 5),
            row(rank, 0, "forward", 5, 8, device_ns=forward * MS),
            meet(rank, 0, 8, 9, device_ns=(60 - 5 - forward) * MS),
            row(rank, 0, "optimizer", 9, 70, device_ns=10 * MS),
        ]
    account = account_of(rows, on_device=True)
    assert own_ms(account, 0) == {"data": 5, "forward": 25, "communication": 10, "optimizer": 10, "waiting": 20}
    assert own_ms(account, 1) == {"data": 5, "forward": 45, "communication": 10, "optimizer": 10, "waiting": 0}
    assert account.wall_ns.tolist() == [[70 * MS, 70 * MS]], "the clock's"


def test_what_lies_within_another_on_the_device_is_cut_out_of_it() -> None:
    rows = [
        row(0, 0, "step", 0, 100),
        row(0, 0, "backward", 0, 6, device_ns=80 * MS),
        row(0, 0, "recompute", 2, 4, depth=1, parent="backward", device_ns=30 * MS),
    ]
    assert own_ms(account_of(rows, on_device=True)) == {"recompute": 30, "backward": 50, "waiting": 0}


# --- clocks ---


def test_a_clock_that_jumps_is_found_by_the_ends_that_ranks_share() -> None:
    job = make_job(3, kind="phase", layout="data", ranks=8, causes=1)
    recording = plain_recording(job)
    straight = account_of_job(job, recording, with_clocks=True)
    recording.jump_ns[::3, 5] = 40 * MS
    account = account_of_job(job, recording, with_clocks=True)
    assert account.jumped.tolist() == [5] and not len(straight.jumped)
    inside = KINDS.index("between steps")
    moved, known = (np.delete(each.own_ns, inside, axis=2) for each in (account, straight))
    assert np.abs(moved - known).max() < 0.05 * MS
    assert np.abs(account.waiting_ns - straight.waiting_ns).max() < 0.05 * MS


def test_clocks_that_are_apart_and_drift_do_not_jump() -> None:
    job = make_job(4, kind="phase", layout="ddp", ranks=8, causes=1)
    recording = plain_recording(job)
    recording.offset_ns[:], recording.drift[:] = np.arange(8) * 30 * MS, np.arange(8) * 2e-6
    account, straight = account_of_job(job, recording, with_clocks=True), account_of_job(job)
    assert not len(account.jumped)
    assert np.abs(account.own_ns - straight.own_ns).max() < 0.05 * MS


# --- any job ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_ranks_did_and_waited_is_their_step(layout: str) -> None:
    """On jobs of seeds: their own clocks, some cut or missing."""
    for seed in (11, 12):
        job = make_job(seed, layout=layout, ranks=8, causes=2)
        recording = make_recording(job, seed, "csv")
        account = account_of_job(job, recording, with_clocks=True)
        adds_up(account)
        rest = [rank for rank in range(job.program.ranks) if rank not in recording.missing]
        assert account.ranks.tolist() == rest
        steps = recording.steps[rest]
        assert np.isfinite(account.wall_ns).sum(axis=0).tolist() == steps.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_computing_is_as_long_as_it_was_drawn(layout: str) -> None:
    """Whatever runs beside it, and whoever is waited for."""
    job = make_job(5, layout=layout, kind="rank", ranks=8, causes=1)
    account = account_of_job(job)
    for kind in ("data", "forward", "backward", "optimizer", "gc"):
        drawn = np.zeros((job.steps, job.program.ranks))
        for number, operation in enumerate(job.program.operations):
            if operation.kind == kind:
                ranks = job.program.roles[operation.role]
                drawn[:, ranks] += job.played.end[number] - job.played.begin[number]
        found = account.own_ns[:, :, KINDS.index(kind)] / MS
        assert np.abs(found - drawn).max() < 1e-3, kind


def test_what_was_queued_was_launched_where_it_is_on_other_ranks() -> None:
    """Rank 0 launches at half of its backward, as it starts; rank 1's is queued till 30, and was launched at 25."""
    rows = []
    for rank, backward in enumerate((60, 50)):
        rows += [row(rank, 0, "step", 0, 100), row(rank, 0, "backward", 0, backward)]
        first = (0, 25) if rank == 0 else (0, 30)
        rows += [meet(rank, 0, *first, thread=2), meet(rank, 0, 30, 80, name="reduce_scatter", thread=2)]
    account = account_of(rows)
    syncs = account.syncs
    begins = syncs.start_ns.min()
    assert ((syncs.start_ns - begins) / MS).tolist() == [0, 30, 0, 30]
    assert ((syncs.launch_ns - begins) / MS).tolist() == [0, 30, 0, 25]
    adds_up(account)


def test_a_send_was_launched_as_sends_are_and_not_as_receives() -> None:
    """Rank 0 sends after each of two backwards; the second send of step 0 is queued behind a slow one."""
    rows = []
    for begin, first_ms in ((0, 40), (100, 1)):
        step, sent, received = begin // 100, begin + 20 + first_ms, begin + 25 + first_ms
        ends = max(begin + 40, received) + 10
        rows += [row(0, step, "step", begin, begin + 90), row(1, step, "step", begin, begin + 90)]
        rows += [row(0, step, "backward", begin, begin + 20), row(0, step, "backward", begin + 20, begin + 40)]
        rows += [row(1, step, "forward", sent, received)]
        for rank, name, starts in ((0, "send", (begin + 20, max(begin + 40, sent))), (1, "recv", (begin, received))):
            for place, (start, end) in enumerate(zip(starts, (sent, ends), strict=True)):
                rows.append(meet(rank, step, start, end, name=name, thread=2, sequence=place))
    account = account_of(rows)
    mine = account.syncs.rank == 0
    launched = (account.syncs.launch_ns[mine] - account.syncs.start_ns.min()) / MS
    assert sorted(launched.tolist()) == [20, 40, 120, 140]


@pytest.mark.parametrize(("late", "jumps"), [((4,), []), ((2,), [2]), ((2, 4), [2])])
def test_one_late_step_at_the_end_is_no_clock_that_jumps(late: tuple[int, ...], jumps: list[int]) -> None:
    """Rank 2 sees steps 30 ms later than the others: a clock comes back, a thread that is late at the end may not."""
    rows = []
    for rank in range(5):
        for step in range(5):
            begin = 100 * step + 30 * (rank == 2 and step in late)
            rows += [
                row(rank, step, "step", begin, begin + 60),
                row(rank, step, "forward", begin, begin + 40),
                meet(rank, step, begin + 40, begin + 50),
            ]
    assert account_of(rows).jumped.tolist() == jumps
