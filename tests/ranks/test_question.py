"""The one question, by hand: what is beyond its like, in which steps, and the smallest of what gains most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.account import KINDS
from profiler_wrapper.ranks.excess import Job, excess_of, hits
from profiler_wrapper.ranks.graph import build
from profiler_wrapper.ranks.question import Answer, ask
from rank_accounts import MS, account_of, meet, row

STEPS, RANKS = 12, 8
PHASES = {"data": 2.0, "forward": 20.0, "backward": 40.0}
Extra = Callable[[int, int], Mapping[str, float]]
WORLD = {"world": range(RANKS)}


def job_of(
    extra: Extra = lambda rank, step: {},
    *,
    hosts: Sequence[str] = ("",) * RANKS,
    stages: Sequence[int] = (0,) * RANKS,
    groups: Mapping[str, Sequence[int]] = WORLD,
    transfer_ms: Callable[[str, int], float] = lambda group, step: 8.0,
    noise: float = 0.0,
    ranks: int = RANKS,
    absent: bool = False,
) -> Job:
    """A step: data 2 ms, forward 20, backward 40, an all-reduce of each group, an optimizer of 5. All to the nanosecond
    but for what `extra(rank, step)` adds, and noise. "save" comes behind the optimizer."""
    chance = np.random.default_rng(3)
    now, rows = [0.0] * ranks, []

    def does(rank: int, step: int, kind: str, length: float) -> None:
        rows.append(row(rank, step, kind, now[rank], now[rank] + length))
        now[rank] += length

    for step in range(STEPS):
        begin = list(now)
        for rank in range(ranks):
            for kind in (*PHASES, "gc"):
                length = PHASES.get(kind, 0.0) * chance.lognormal(0, noise) + extra(rank, step).get(kind, 0.0)
                if length:
                    does(rank, step, kind, length)
        for group, members in groups.items():
            met = max(now[rank] for rank in members) + transfer_ms(group, step)
            for rank in members:
                rows.append(meet(rank, step, now[rank], met, group=group))
                now[rank] = met
        for rank in range(ranks):
            does(rank, step, "optimizer", 5.0 + extra(rank, step).get("optimizer", 0.0))
            if more := extra(rank, step).get("checkpoint"):
                does(rank, step, "checkpoint", more)
            rows.append(row(rank, step, "step", begin[rank], now[rank]))
    account = account_of(rows)
    names = ["all_reduce"] * len(groups)
    return Job(
        account,
        build(account),
        np.ones(STEPS, dtype=bool),
        np.array(stages[:ranks]),
        tuple(hosts[:ranks]),
        tuple(names),
        tuple(sorted(groups)),
        absent=absent,
    )


def said(answer: Answer, at: int = 0) -> dict[str, Any]:
    one = answer.causes[at]
    return {"what": one.what, "kinds": one.kinds, "ranks": one.ranks, "gain": round(one.gain_ns / MS, 2)}


def only(ranks: Sequence[int], kind: str, more: float, steps: Sequence[int] = range(STEPS)) -> Extra:
    return lambda rank, step: {kind: more} if rank in ranks and step in steps else {}


# --- the steps that something hits ---


def found_hits(beyond: Sequence[float], times: Sequence[float] | None = None) -> tuple[list[int], float, float]:
    values = np.array(beyond, dtype=float)
    hit, mean, factor = hits(values, values + 10 if times is None else np.array(times, dtype=float))
    return np.flatnonzero(hit).tolist(), mean, factor


def test_all_steps_are_hit_alike() -> None:
    assert found_hits([30.0] * 6) == (list(range(6)), 30, 0.25)


def test_some_steps_are_hit() -> None:
    assert found_hits([0, 0, 30, 0, 30, 0, 30, 0]) == ([2, 4, 6], 30, 0.25)


def test_a_gain_is_of_the_mean_of_the_steps_that_are_hit() -> None:
    assert found_hits([20, 30, 40, 30, 20, 40]) == (list(range(6)), 30, 0.25)


def test_once_is_chance() -> None:
    assert found_hits([0, 0, 0, 30, 0, 0, 0, 0]) == ([], 0, 1)
    assert found_hits([30.0]) == ([0], 30, 0.25), "of one step it is all"


def test_what_is_beyond_nothing_is_no_hit() -> None:
    assert found_hits([-1, -2, 0]) == ([], 0, 1)
    assert found_hits([np.nan, np.nan]) == ([], 0, 1)


def test_steps_that_are_not_known_are_not_hit() -> None:
    assert found_hits([30, np.nan, 30, np.nan, 30, 30]) == ([0, 2, 4, 5], 30, 0.25)


def test_a_step_that_takes_far_longer_hides_none_of_the_others() -> None:
    steps, mean, _ = found_hits([30.0] * 13 + [170.0])
    assert steps == list(range(13)) and mean == 30, "once is chance, whatever the others are"


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_hits_nothing(seed: int) -> None:
    assert found_hits(np.random.default_rng(seed).normal(0, 1, 24).tolist())[0] == []


# --- the like ---


def test_the_like_is_about_the_first_quartile_of_a_role() -> None:
    """Of eight ranks the second to the fourth quickest: 20, 24 and 24 ms. A mean of all would be 26."""
    job = job_of(lambda rank, step: {"forward": 10.0 if rank > 3 else 4.0 if rank > 1 else 0.0})
    excess = excess_of(job).mean_ns[:, KINDS.index("forward")] / MS
    like = (0 + 4 + 4) / 3
    assert excess.tolist() == pytest.approx([0, 0, 4 - like, 4 - like, *[10 - like] * 4])


def test_ranks_of_another_stage_are_not_alike_in_what_they_compute() -> None:
    job = job_of(lambda rank, step: {"forward": 10.0 * (rank > 3)}, stages=[0] * 4 + [1] * 4)
    assert not excess_of(job).mean_ns[:, KINDS.index("forward")].any()


def test_a_save_is_beside_none() -> None:
    job = job_of(lambda rank, step: {"checkpoint": 30.0 if step % 4 == 3 else 0.0})
    excess = excess_of(job)
    place = KINDS.index("checkpoint")
    assert (excess.mean_ns[:, place] / MS).tolist() == [30] * RANKS
    assert np.flatnonzero(excess.hit[:, 0, place]).tolist() == [3, 7, 11]


# --- who is named ---


def test_a_phase_of_a_rank() -> None:
    answer = ask(job_of(only([5], "backward", 12.5)))
    assert said(answer) == {"what": "rank", "kinds": ("backward",), "ranks": (5,), "gain": 12.5}
    assert len(answer.causes) == 1 and answer.lost_ns == 12.5 * MS and answer.causes[0].steps.all()
    assert answer.step_ns == (75 + 12.5) * MS and answer.error == 0


def test_of_two_slow_ranks_the_slower_one_with_what_it_gains_alone() -> None:
    """Rank 2 alone gains nothing, and costs 30 ms once rank 5 is mended."""
    answer = ask(job_of(lambda rank, step: {2: {"forward": 30.0}, 5: {"backward": 45.0}}.get(rank, {})))
    assert said(answer) == {"what": "rank", "kinds": ("backward",), "ranks": (5,), "gain": 15}
    assert said(answer, 1) == {"what": "rank", "kinds": ("forward",), "ranks": (2,), "gain": 30}
    assert answer.lost_ns == 45 * MS


def test_several_phases_of_a_rank() -> None:
    answer = ask(job_of(lambda rank, step: {"forward": 10.0, "backward": 20.0} if rank == 3 else {}))
    assert said(answer) == {"what": "rank", "kinds": ("forward", "backward"), "ranks": (3,), "gain": 30}


def test_ranks_that_are_as_slow_are_named_together() -> None:
    answer = ask(job_of(only([1, 6], "forward", 30.0)))
    assert said(answer) == {"what": "ranks", "kinds": ("forward",), "ranks": (1, 6), "gain": 30}
    assert len(answer.causes) == 1


def test_half_of_all_ranks() -> None:
    answer = ask(job_of(only([0, 3, 4, 7], "forward", 30.0)))
    assert said(answer) == {"what": "ranks", "kinds": ("forward",), "ranks": (0, 3, 4, 7), "gain": 30}


HOSTS = ["node-a"] * 4 + ["node-b"] * 4


def test_ranks_that_are_as_slow_and_all_of_one_host_are_the_host() -> None:
    answer = ask(job_of(only([4, 5, 6, 7], "forward", 30.0), hosts=HOSTS))
    assert said(answer) == {"what": "host", "kinds": ("forward",), "ranks": (4, 5, 6, 7), "gain": 30}
    assert answer.causes[0].host == "node-b"


def test_one_rank_of_a_host_is_no_host() -> None:
    answer = ask(job_of(only([6], "forward", 30.0), hosts=HOSTS))
    assert said(answer) == {"what": "rank", "kinds": ("forward",), "ranks": (6,), "gain": 30}


def test_the_only_host_is_not_named() -> None:
    answer = ask(job_of(only([4, 5, 6, 7], "forward", 30.0), hosts=["node-a"] * RANKS))
    assert said(answer)["what"] == "ranks" and answer.causes[0].host is None


def test_some_of_the_steps() -> None:
    """Since step 7; a step gains what all of them do, over all steps."""
    answer = ask(job_of(only([2], "forward", 24.0, range(7, STEPS))))
    assert said(answer) == {"what": "rank", "kinds": ("forward",), "ranks": (2,), "gain": 10}
    assert np.flatnonzero(answer.causes[0].steps).tolist() == [7, 8, 9, 10, 11]


def test_what_a_rank_can_do_without() -> None:
    for kind in ("gc", "checkpoint"):
        answer = ask(job_of(only([2], kind, 60.0, (3, 7, 11))))
        assert said(answer) == {"what": "rank", "kinds": (kind,), "ranks": (2,), "gain": 15}


def test_a_save_of_all_ranks() -> None:
    answer = ask(job_of(only(range(RANKS), "checkpoint", 60.0, (3, 7, 11))))
    assert said(answer) == {"what": "all", "kinds": ("checkpoint",), "ranks": (), "gain": 15}


def test_all_ranks_take_longer_in_some_steps() -> None:
    answer = ask(job_of(only(range(RANKS), "backward", 24.0, (4, 5, 6))))
    assert said(answer) == {"what": "all", "kinds": ("backward",), "ranks": (), "gain": 6}
    assert np.flatnonzero(answer.causes[0].steps).tolist() == [4, 5, 6]


def test_data_of_all_ranks_in_all_steps() -> None:
    answer = ask(job_of(only(range(RANKS), "data", 30.0)))
    assert said(answer) == {"what": "all", "kinds": ("data",), "ranks": (), "gain": 32}


def test_a_stage_whose_ranks_all_compute_longer() -> None:
    answer = ask(job_of(only([4, 5, 6, 7], "forward", 30.0), stages=[0] * 4 + [1] * 4))
    assert said(answer) == {"what": "stage", "kinds": ("forward",), "ranks": (4, 5, 6, 7), "gain": 30}


def test_what_gains_less_than_two_in_a_hundred_is_nobodys() -> None:
    assert ask(job_of(only([2], "forward", 1.4))).causes == ()
    assert said(ask(job_of(only([2], "forward", 1.6))))["gain"] == 1.6


def test_equal_ranks_lose_nothing() -> None:
    answer = ask(job_of())
    assert answer.causes == () and answer.lost_ns == 0 and answer.suspects == ()


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_alone_names_nobody(noise: float) -> None:
    answer = ask(job_of(noise=noise))
    assert answer.causes == ()
    assert 0 <= answer.lost_ns < answer.step_ns


# --- links and groups ---

PAIRS = {f"pair{rank}": (rank, rank + 4) for rank in range(4)}
NODES = {"node0": range(4), "node1": range(4, 8)}


def test_one_link_of_four_alike() -> None:
    answer = ask(job_of(groups=PAIRS, transfer_ms=lambda group, step: 48.0 if group == "pair1" else 8.0))
    assert said(answer) == {"what": "link", "kinds": ("communication",), "ranks": (1, 5), "gain": 40}
    (cause,) = answer.causes
    assert (cause.typical_ns, cause.excess_ns) == (8 * MS, 40 * MS)


def test_one_group_of_two_alike() -> None:
    answer = ask(job_of(groups=NODES, transfer_ms=lambda group, step: 28.0 if group == "node1" else 8.0))
    assert said(answer) == {"what": "group", "kinds": ("communication",), "ranks": (4, 5, 6, 7), "gain": 20}


def test_a_group_that_has_no_like_is_beside_its_own_other_steps() -> None:
    answer = ask(job_of(transfer_ms=lambda group, step: 32.0 if step in (2, 3, 9) else 8.0))
    assert said(answer) == {"what": "group", "kinds": ("communication",), "ranks": tuple(range(8)), "gain": 6}
    assert np.flatnonzero(answer.causes[0].steps).tolist() == [2, 3, 9]


@pytest.mark.parametrize(
    ("slow", "gain"),
    [((0, 1, 2, 4, 8, 9, 10, 11), None), (range(4, 12), 16), (range(8), 16)],
    ids=["now and then", "since", "until"],
)
def test_a_group_that_is_slow_in_most_steps_is_as_always(slow: Sequence[int], gain: int | None) -> None:
    """Without a like: what most steps take is typical, unless it began or ended once."""
    answer = ask(job_of(transfer_ms=lambda group, step: 32.0 if step in slow else 8.0))
    assert (said(answer)["gain"] if answer.causes else None) == gain


def test_a_group_that_others_wait_for_is_not_slow_itself() -> None:
    """Rank 6 comes late: its group's transfer is as long as ever."""
    answer = ask(job_of(only([6], "forward", 30.0), groups=NODES | WORLD))
    assert said(answer) == {"what": "rank", "kinds": ("forward",), "ranks": (6,), "gain": 30}


# --- ranks that are not recorded ---


def test_all_wait_for_a_rank_that_was_not_recorded() -> None:
    """The seven others come at one time, up to 30 ms apart from step to step, and the missing one 30 ms behind."""
    late = np.random.default_rng(0).uniform(0, 30, STEPS)
    answer = ask(
        job_of(
            lambda rank, step: {"forward": float(late[step])},
            transfer_ms=lambda group, step: 8.0 + 30 - float(late[step]),
            ranks=7,
            groups={"world": range(7)},
            absent=True,
        )
    )
    assert "unrecorded" in [one.what for one in answer.causes]


def test_a_long_transfer_is_no_sign_of_a_rank_that_was_not_recorded() -> None:
    late = np.random.default_rng(0).uniform(0, 30, STEPS)
    answer = ask(
        job_of(
            lambda rank, step: {"forward": float(late[step])},
            transfer_ms=lambda group, step: 38.0,
            ranks=7,
            groups={"world": range(7)},
            absent=True,
        )
    )
    assert "unrecorded" not in [one.what for one in answer.causes]


def test_a_lone_group_whose_transfers_differ_from_step_to_step_is_not_slow_in_some() -> None:
    """On a busy machine they are as long as it lets them; a group that is slow in four steps stands apart."""
    drawn = np.random.default_rng(7).permutation(np.linspace(0, 30, STEPS))
    assert "group" not in {one.what for one in ask(job_of(transfer_ms=lambda group, step: 8 + drawn[step])).causes}
    slow = ask(job_of(transfer_ms=lambda group, step: 8 + 15 * (step % 3 == 1) + drawn[step] / 20))
    assert [one.what for one in slow.causes] == ["group"]
    assert slow.causes[0].gain_ns == pytest.approx(5 * MS, rel=0.1)
