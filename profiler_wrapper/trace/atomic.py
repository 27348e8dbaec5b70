"""Writing, or moving, a file so that it is either whole or not there."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import math
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from profiler_wrapper.errors import WrongUse, shown

_PIECE_BYTES = 1 << 20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to; at the end reads it back and moves it into place.

    If anything fails, what was there before stays, and nothing is left beside it.

    Raises OSError: the file could not be written whole; always with the path.
    """
    # The process first: what one that was killed leaves is known by it. Nobody can have put a link at such a name. The
    # ending stays, which writers go by.
    beside = path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}-{path.name}")
    try:
        check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        _check_end(beside)
        os.replace(beside, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno or errno.EIO, f"could not be written: {reason}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def check_path(path: str | os.PathLike[str]) -> None:
    """Raises WrongUse where no file can have this name."""
    try:
        if b"\0" in os.fsencode(path):
            raise WrongUse(f"{shown(path)} is no path: there is a NUL in it.")
    except UnicodeEncodeError as error:
        raise WrongUse(f"{shown(path)} is no path: {error}.") from error


def check_replaceable(path: Path) -> None:
    """Raises OSError where something lies that is no file: a device, a pipe, a directory."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "is no file that can be replaced; name another one", str(path))


def _check_end(path: Path) -> None:
    """Raises OSError unless the file ends as one of its kind must; a full disk may cut it silently."""
    if path.name.endswith(".gz"):
        try:
            with gzip.open(path) as packed:
                end = b""
                while piece := packed.read(_PIECE_BYTES):
                    end = (end + piece)[-64:]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"its gzip data are damaged ({error}); is the disk full?") from error
    else:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            end = file.read()
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    whole = {
        "json": end.rstrip().endswith((b"}", b"]")),
        "png": end.endswith(b"IEND\xaeB`\x82"),
        "pickle": end.endswith(b"."),
        "html": end.rstrip().endswith(b"</html>"),
    }
    if not whole.get(kind, True):
        raise OSError(f"its end is missing (the last bytes are {shown(end[-12:])}); is the disk full?")


def move(file: Path, target: Path) -> None:
    """Move a file to another disk: it is taken away only after its copy was read back at its end. Raises OSError."""
    with replacing(target) as beside:
        shutil.copyfile(file, beside)
        if beside.stat().st_size != file.stat().st_size:
            raise OSError(f"{beside.stat().st_size} of {file.stat().st_size} bytes were copied")
    file.unlink()


def remove_empty(directory: Path) -> None:
    """Take away the directories below `directory` in which nothing is, and itself."""
    for place, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)


def json_bytes(value: Any) -> bytes:
    """`value` as JSON that every parser reads: numbers that are not finite are null."""
    try:
        return msgspec.json.format(msgspec.json.encode(value, enc_hook=plain_data), indent=1) + b"\n"
    except (ValueError, TypeError, OverflowError):  # lone surrogates, odd keys, integers of more than 64 bits
        return json.dumps(finite(value), indent=1, allow_nan=False, default=plain_data).encode() + b"\n"


def plain_data(value: Any) -> Any:
    """What json does not know, as what it does: numpy's numbers and arrays, sets; the rest as text."""
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def finite(value: Any) -> Any:
    """Plain data whose numbers that are not finite are None, as JSON has none for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
