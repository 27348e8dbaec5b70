"""Reads what `torch.cuda.memory._dump_snapshot` wrote, of any version of torch; nothing in the file is run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from profiler_wrapper.errors import BrokenSnapshot
from profiler_wrapper.recording.garbage import no_garbage_collection
from profiler_wrapper.recording.plain_pickle import NotPlain, load_plain
from profiler_wrapper.recording.snapshot_records import MemorySnapshot
from profiler_wrapper.recording.snapshot_structure import Structure, WrongStructure

_MAKE_ONE = "make one with torch.cuda.memory._dump_snapshot(path)"
_OTHER_FILES = {
    b"\x1f\x8b": "it is compressed with gzip; unpack it first (gunzip)",
    b"PK\x03\x04": f"it is a zip archive, perhaps a checkpoint of torch.save; {_MAKE_ONE}",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd; unpack it first (unzstd)",
    b"{": f"it looks like JSON, so no pickle (`analyze` reads traces); {_MAKE_ONE}",
    b"<": f"it looks like a page of HTML, so no pickle; {_MAKE_ONE}",
}


def read_snapshot(path: str | os.PathLike[str]) -> MemorySnapshot:
    """Reads a memory snapshot. Takes time and memory in proportion to the file.

    Raises:
        BrokenSnapshot: it is cut, damaged, no snapshot, or it wants to call something, which is refused.
        OSError: it cannot be opened.
    """
    path = Path(path)
    try:
        data = _bytes(path)
        with no_garbage_collection():
            return Structure(len(data)).snapshot(load_plain(data), name=path.name)
    except NotPlain as error:
        raise BrokenSnapshot(f"{path} is no readable memory snapshot: {error}. {_what_to_do(error)}") from error
    except WrongStructure as error:
        raise BrokenSnapshot(f"{path} is a pickle, but no memory snapshot: {error}; {_MAKE_ONE}") from error
    except MemoryError as error:
        raise BrokenSnapshot(f"{path} is larger than the memory of this machine; read it on a larger one") from error


def _what_to_do(error: NotPlain) -> str:
    text = str(error)
    if "refused" in text:
        return "Do not open it with pickle.load or torch.load unless you trust who made it."
    return "Copy it again whole, or write a new one with torch.cuda.memory._dump_snapshot(path)."


def _bytes(path: Path) -> bytes:
    if path.is_dir():
        raise BrokenSnapshot(f"{path} is a directory; give the file of a memory snapshot (.pickle)")
    with open(path, "rb", opener=_open_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise BrokenSnapshot(f"{path} is no plain file; give the file of a memory snapshot (.pickle)")
        data = file.read()
    if not data:
        raise BrokenSnapshot(f"{path} is empty; was the process killed while it wrote? {_MAKE_ONE}")
    for start, what in _OTHER_FILES.items():
        if data.startswith(start):
            raise BrokenSnapshot(f"{path} is no memory snapshot: {what}")
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe would wait for its writer for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
