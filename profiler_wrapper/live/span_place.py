"""Whose spans they are, and where they are written, as far as that is known yet."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from profiler_wrapper.capture.runinfo import RunInfo, run_info
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.process_role import has_process_group, is_worker
from profiler_wrapper.recording.store import RUN_NAME_VARIABLE, given_directory, safe_name
from profiler_wrapper.recording.timer_files import TimerFiles, claim_timer_files

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlace:
    """What the user says of it.

    Attributes:
        output_dir: absolute.
        rank, world_size, device_mesh: None: as the process group, the environment ... tell.
        coordinates: in the mesh, where there is no `device_mesh`; None: not known.
    """

    output_dir: Path
    run_name: str | None = None
    prefix: str = "profile"
    rank: int | None = None
    world_size: int | None = None
    device_mesh: Any = None
    coordinates: Mapping[str, int] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def key(self) -> tuple[Any, ...]:
        """Places with the same one have the same files."""
        return self.output_dir, self.run_name, self.prefix, self.rank, self.world_size

    @property
    def told_name(self) -> str | None:
        """The name of the run, where the user says one."""
        named = self.environment.get(RUN_NAME_VARIABLE) or self.run_name
        return safe_name(named, self.prefix) if named else None

    def claim(self, owner: Owner) -> TimerFiles:
        """New files. Raises OSError: they cannot be made."""
        return claim_timer_files(
            self.output_dir,
            rank=owner.info.rank,
            world_size=owner.info.world_size,
            run_name=self.run_name,
            prefix=self.prefix,
            worker=os.getpid() if owner.worker else None,
            environment=self.environment,
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """This process within its job.

    Attributes:
        worker: it belongs to the rank and is none itself.
        known: nothing that is found out later changes it.
    """

    info: RunInfo
    worker: bool
    known: bool

    @property
    def heads(self) -> tuple[bytes, bytes]:
        """What each line of the text, and each JSON line, begins with."""
        rank = self.info.rank
        coordinates = "".join(f'"{name}":{place},' for name, place in self.info.coordinates.items())
        return f"[RANK {rank}] ".encode(), f'{{"rank":{rank},{coordinates}'.encode()

    def same_place(self, other: Owner) -> bool:
        """Both have the same files."""
        return (self.info.rank, self.info.world_size, self.worker) == (
            other.info.rank,
            other.info.world_size,
            other.worker,
        )

    def header(self, files: TimerFiles, clock: Mapping[str, int]) -> bytes:
        """The first of the JSON lines."""
        info = self.info
        return header_line(
            {
                "schema_version": SCHEMA_VERSION,
                "rank": info.rank,
                "world_size": info.world_size,
                "coordinates": dict(info.coordinates),
                "host": socket.gethostname(),
                "run": files.root.name,
                "attempt": files.attempt,
                "pid": os.getpid(),
                "worker": self.worker,
                "device": info.device,
                "versions": dict(info.versions),
                "clock": dict(clock),
            },
        )


def checked_place(
    *,
    output_dir: Any,
    run_name: Any,
    prefix: Any,
    rank: Any,
    world_size: Any,
    device_mesh: Any,
) -> SpanPlace:
    """What a user says of where spans go.

    Raises:
        WrongUse: a value means nothing.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        least = 1 if name == "world_size" else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise WrongUse(f"{name}={value!r}: give a whole number, {least} or more.")
    for name, value in (("run_name", run_name), ("prefix", prefix)):
        if not (isinstance(value, str) and value) and not (name == "run_name" and value is None):
            raise WrongUse(f"{name}={value!r}: give a text, the same on all ranks.")
    return SpanPlace(
        output_dir=given_directory(output_dir, "output_dir").absolute(),
        run_name=run_name,
        prefix=prefix,
        rank=rank,
        world_size=world_size,
        device_mesh=device_mesh,
    )


def find_owner(place: SpanPlace, *, forked: bool = False) -> Owner:
    """By what is told, the process group, the environment. Asks no other process.

    Args:
        forked: what is told was told to the process that this one was forked from.
    """
    info = run_info(
        rank=place.rank,
        device_mesh=place.device_mesh,
        coordinates=place.coordinates,
        environment=place.environment,
        version=str(getattr(sys.modules.get("profiler_wrapper"), "__version__", "")),
    )
    world_size = max(place.world_size or info.world_size, info.rank + 1)
    told = place.rank is not None and not forked
    return Owner(
        replace(info, world_size=world_size),
        worker=is_worker(told=told, environment=place.environment),
        known=has_process_group(),
    )


def header_line(told: Mapping[str, Any]) -> bytes:
    """A JSON line that is no span."""
    return msgspec.json.encode({"header": told}) + b"\n"


def with_head(lines: bytes, old: bytes, new: bytes) -> bytes:
    """Lines that began otherwise; the header they had is left out."""
    return b"".join(
        new + line[len(old) :] if line.startswith(old) else line
        for line in lines.splitlines(keepends=True)
        if b'"schema_version"' not in line[:40]
    )
