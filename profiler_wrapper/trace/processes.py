"""Tell the processes of a trace apart, where the traces of several ranks were put into one file."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from profiler_wrapper.errors import BrokenTrace, SeveralProcesses, WrongUse
from profiler_wrapper.trace.recording import DEVICE_CATEGORIES, Bool, Category, Int8, Int32, Int64, Lane

Pid = int | str
_MOST_DEVICES = 1 << 16
_Label = int | tuple[str, str]  # what was added to all pids of a process: a number, or text before and after them
_INSEPARABLE = (
    "it holds events of several processes, as of ranks whose traces were put together, and pids do not tell whose the "
    "events of the devices are (CPU pids: {}). Give the trace of each rank, or label all pids with the rank"
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
    devices = np.unique(pid_of[runs] * _MOST_DEVICES + device[runs]).tolist()
    numbers = [(pids[one // _MOST_DEVICES], one % _MOST_DEVICES) for one in devices]
    labels = dict.fromkeys(one for pid, index in numbers if pid not in hosts for one in _labels(pid, index, hosts))
    group_of = [max(labels, key=partial(_fit, pid), default=pid) for pid in pids]
    group_of = [one if one in labels and _fit(pid, one) >= 0 else pid for one, pid in zip(group_of, pids, strict=True)]
    groups = {one: i for i, one in enumerate(dict.fromkeys(group_of))}
    group = np.array([groups[one] for one in group_of], dtype=np.int64)
    stepping = np.unique(pid_of[names_model & (category == Category.ANNOTATION)])
    _check_launches(group[pid_of], pid_of, np.where(calls | runs, correlation, -1), runs, pids)
    if len(set(group[stepping].tolist())) < len(stepping):
        raise BrokenTrace(_INSEPARABLE.format(", ".join(str(pids[i]) for i in stepping.tolist())))
    works = next((mask for mask in (calls | runs, names_model, on_cpu) if mask.any()), on_cpu)
    events = np.bincount(pid_of[on_cpu | runs], minlength=len(pids)).tolist()
    found = []
    for i in np.unique(group[pid_of[works]]).tolist():
        members = [pids[j] for j in np.flatnonzero(group == i).tolist()]
        if here := [pid for pid in members if pid in hosts]:
            found.append(Process(str(max(here, key=lambda pid: events[number[pid]])), frozenset(members)))
    if len(found) < 2:
        return [Process(found[0].name if found else "", frozenset(pids))]
    if {pid for pid, _ in numbers} - {pid for one in found for pid in one.pids}:
        raise BrokenTrace(_INSEPARABLE.format(", ".join(one.name for one in found)))
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
        raise WrongUse(f"{path}: process {asked!r}: give one of {', '.join(map(repr, names))}")
    return found[chosen[0]], chosen[0]


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


def _check_launches(group: Int64, pid_of: Int64, correlation: Int64, runs: Bool, pids: Sequence[Pid]) -> None:
    """Raises BrokenTrace where a device event may be launched by either of two calls."""
    chosen = np.flatnonzero(correlation >= 0)
    chosen = chosen[np.lexsort((correlation[chosen], group[chosen]))]
    if not len(chosen):
        return
    is_new = (np.diff(correlation[chosen]) != 0) | (np.diff(group[chosen]) != 0)
    key = np.cumsum(np.append(False, is_new))
    count = int(key[-1]) + 1
    ran, pid = runs[chosen], pid_of[chosen]
    device_events, calls = np.bincount(key[ran], minlength=count), np.bincount(key[~ran], minlength=count)
    host = np.full(count, -1, dtype=np.int64)
    host[key[~ran]] = pid[~ran]
    of_two = np.zeros(count, dtype=np.bool_)
    of_two[key[~ran][host[key[~ran]] != pid[~ran]]] = True
    wrong = (calls > 1) & (device_events > 0) & (of_two | (device_events > 1))
    if wrong.any():
        whose = dict.fromkeys(pids[i] for i in pid[~ran & wrong[key]].tolist())
        raise BrokenTrace(_INSEPARABLE.format(", ".join(map(str, whose))))
