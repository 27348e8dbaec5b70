"""Tell the processes of a trace apart, where the traces of several ranks were put into one file."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from profiler_wrapper.errors import BrokenTrace, SeveralProcesses, WrongUse, listed, shown
from profiler_wrapper.trace.nesting import nest
from profiler_wrapper.trace.recording import DEVICE_CATEGORIES, Bool, Category, Int8, Int32, Int64, Lane

Pid = int | str
_MOST_DEVICES = 1 << 16
_ROUNDED_NS = 2000  # times that a tool wrote as whole microseconds, or as floats, cross by less
_Label = int | tuple[str, str]  # what was added to all pids of a process: a number, or text before and after them
_INSEPARABLE = (
    "it holds events of several processes, as of ranks whose traces were put together, and pids do not tell whose an "
    "event is (CPU pids: {}). Give the trace of each rank, or label all pids with the rank"
)


class Process(NamedTuple):
    name: str  # the pid of its CPU events
    pids: frozenset[Pid]

    @property
    def rank(self) -> int | None:
        """The rank, where the pid was labelled with it."""
        found = re.search(r"(?i)rank\W?(\d{1,9})", self.name)
        return int(found[1]) if found else None


def find_processes(
    lanes: Sequence[Lane], category: Int8, lane: Int32, device: Int64, correlation: Int64, names_model: Bool
) -> list[Process]:
    """The processes in the order of the file; helpers, which launch nothing, belong to the one that they are beside.

    A device's pid is its number: what a merger made of it tells how it labelled all pids of that process.
    `names_model`: per event, whether its name is that of a step, a layer or an autograd node.

    Raises:
        BrokenTrace: pids do not tell the processes apart.
    """
    pids = list(dict.fromkeys(one.pid for one in lanes))
    number = {pid: i for i, pid in enumerate(pids)}
    pid_of = np.array([number[one.pid] for one in lanes], dtype=np.int64)[lane]
    runs, calls = np.isin(category, DEVICE_CATEGORIES), category == Category.RUNTIME
    on_cpu = calls | (category == Category.CPU_OP)
    hosts = {pids[i] for i in np.unique(pid_of[on_cpu]).tolist()}
    numbered = runs & (device >= 0)
    devices = np.unique(pid_of[numbered] * _MOST_DEVICES + device[numbered]).tolist()
    numbers = [(pids[one // _MOST_DEVICES], one % _MOST_DEVICES) for one in devices]
    labels = dict.fromkeys(one for pid, index in numbers if pid not in hosts for one in _labels(pid, index, hosts))
    group_of = [max(labels, key=partial(_fit, pid), default=pid) for pid in pids]
    group_of = [one if one in labels and _fit(pid, one) >= 0 else pid for one, pid in zip(group_of, pids, strict=True)]
    groups = {one: i for i, one in enumerate(dict.fromkeys(group_of))}
    group = np.array([groups[one] for one in group_of], dtype=np.int64)
    stepping = np.unique(pid_of[names_model & (category == Category.ANNOTATION)])
    known = (calls | runs) & (correlation >= 0)
    shared = _are_shared(group[pid_of[known]], pid_of[known], correlation[known], runs[known])
    if shared or len(set(group[stepping].tolist())) < len(stepping):
        raise BrokenTrace(_INSEPARABLE.format(listed(sorted(hosts, key=str))))
    works = next((mask for mask in (calls | runs, names_model, on_cpu) if mask.any()), on_cpu)
    events = np.bincount(pid_of[on_cpu | runs], minlength=len(pids)).tolist()
    found = []
    for i in np.unique(group[pid_of[works]]).tolist():
        members = [pids[j] for j in np.flatnonzero(group == i).tolist()]
        if here := [pid for pid in members if pid in hosts]:
            found.append(Process(str(max(here, key=lambda pid: events[number[pid]])), frozenset(members)))
    if len(found) < 2:
        return [Process(found[0].name if found else "", frozenset(pids))]
    if {pids[i] for i in np.unique(pid_of[runs]).tolist()} - {pid for one in found for pid in one.pids}:
        raise BrokenTrace(_INSEPARABLE.format(listed(sorted(hosts, key=str))))
    return found


def choose(path: str, found: Sequence[Process], asked: Pid | None) -> tuple[Process, int]:
    """The process that is asked for, by its pid or a part of it that no other has, and its place among all.

    Raises:
        SeveralProcesses: there are several, and none is asked for.
        WrongUse: there is no such process, or several are so called.
    """
    names = [one.name for one in found]
    if len(found) == 1 and asked is None:
        return found[0], 0
    if asked is None:
        raise SeveralProcesses(path, names)
    chosen = [i for i, name in enumerate(names) if name == str(asked)]
    chosen = chosen or [i for i, name in enumerate(names) if str(asked) in name]
    if len(chosen) != 1:
        raise WrongUse(f"{path}: process {shown(asked)}: give one of {listed(names)}")
    return found[chosen[0]], chosen[0]


def refuse_mixed(
    process: Process, category: Int8, name: Int32, lane: Int32, correlation: Int64, start_ns: Int64, end_ns: Int64,
    kept: Bool, is_aten: Bool,
) -> None:  # fmt: skip
    """Refuse what no process does: calls or ATen ops that cross on a thread, launches at once, two of one number.

    Raises:
        BrokenTrace: there are several processes of one pid.
    """
    calls = kept & (category == Category.RUNTIME)
    scopes = np.flatnonzero(calls | (kept & is_aten & (category == Category.CPU_OP)))
    events = correlation[kept & np.isin(category, DEVICE_CATEGORIES) & (correlation >= 0)]
    launches = np.flatnonzero(calls & np.isin(correlation, events))
    launches = launches[np.lexsort((-end_ns[launches], start_ns[launches], lane[launches]))]
    one, other = launches[:-1], launches[1:]
    half_ns = np.minimum(end_ns[one] - start_ns[one], end_ns[other] - start_ns[other]) / 2
    at_once = (lane[one] == lane[other]) & (end_ns[one] - start_ns[other] > half_ns)
    driven = at_once & (correlation[one] == correlation[other]) & (name[one] != name[other])  # the runtime's driver
    which = 2 * lane[scopes] + calls[scopes]
    crossing = nest(which, start_ns[scopes], end_ns[scopes], slack_ns=_ROUNDED_NS).crossing_lanes
    is_shared = len(np.unique(correlation[launches])) + driven.sum() < len(launches)
    if crossing or (at_once & ~driven).any() or is_shared:
        raise BrokenTrace(_INSEPARABLE.format(process.name))


def _labels(pid: Pid, device: int, hosts: Collection[Pid]) -> list[_Label]:
    """What may have been added to the number of a device to give its pid, where it was added to a pid of a CPU too."""
    made: list[_Label]
    if isinstance(pid, int):
        made = [pid - device]
    else:
        parts = (pid.removesuffix(str(device)), pid.removeprefix(str(device)))
        made = [label for label in ((parts[0], ""), ("", parts[1])) if "".join(label) != pid]
    return [label for label in made if any(_fit(host, label) >= 0 for host in hosts)]


def _fit(pid: Pid, label: _Label) -> int:
    """How much of a pid is that label; -1 where it does not have it."""
    if isinstance(label, int):
        return label if isinstance(pid, int) and 0 <= label <= pid else -1
    fits = isinstance(pid, str) and pid.startswith(label[0]) and pid.endswith(label[1])
    return len(label[0]) + len(label[1]) if fits else -1


def _are_shared(group: Int64, pid_of: Int64, correlation: Int64, runs: Bool) -> bool:
    """Whether device events have the correlation of calls of two processes."""
    if not runs.any() or runs.all():
        return False
    key = np.unique(correlation, return_inverse=True)[1].reshape(-1) * (group.max() + 1) + group
    call, pid, count = key[~runs], pid_of[~runs], int(key.max()) + 1
    host = np.zeros(count, dtype=np.int64)
    host[call] = pid
    return bool(np.isin(call[host[call] != pid], key[runs]).any())
