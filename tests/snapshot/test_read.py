"""Reading a snapshot: every version's structure, and nothing that a hostile or broken file could do."""

from __future__ import annotations

import copyreg
import gzip
import os
import pickle
import resource
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profiler_wrapper.errors import BrokenSnapshot
from profiler_wrapper.snapshot.analyse import allocator_report
from profiler_wrapper.snapshot.read import Stack, read_snapshot
from snapshots import MAIN, MIB, MLP_STACK, FakeAllocator, frame, read, snapshot, training


def small() -> dict[str, Any]:
    gpu = FakeAllocator()
    gpu.malloc(1000, MLP_STACK)
    gpu.free(gpu.malloc(3 * MIB, [MAIN]))
    return snapshot(gpu)


WHOLE = pickle.dumps(small())


def error_of(data: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(data)
        file.flush()
        with pytest.raises(BrokenSnapshot) as caught:
            read_snapshot(file.name)
    return str(caught.value).removeprefix(f"{file.name} ")


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


# -- what wants to be run -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "touch there"), "system"),
        (Calls(eval, "open('there', 'w')"), "eval"),
        (np.arange(3), "numpy"),
        (torch.zeros(2), "torch"),
        (Path("x"), "Path"),
        (Calls, "Calls"),
    ],
)
def test_a_file_that_wants_to_call_something_is_refused(
    value: Any, named: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(pickle.dumps({**small(), "segments": [value]}, protocol=protocol))
    assert "it wants to call " in error
    assert named in error
    assert "refused, none of it was run. Do not open it" in error
    assert not Path("there").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"Pstorage\n.", "a persistent id, which no snapshot has: refused"),
        (b"K\x01Q.", "a persistent id, which no snapshot has: refused"),
        (b"(ios\nsystem\n.", "call os.system"),
        (b"cos\nsystem\n(S'true'\ntR.", "call os.system"),
        (b"\x8c\x02os\x8c\x06system\x93.", "call os.system"),
        (b"K\x01K\x02\x93.", "STACK_GLOBAL requires str"),
        (b"\x82\x01.", "unregistered extension code"),
        (b"X\x02\0\0\0os)R.", "not callable"),
        (b"})\x81.", "NEWOBJ"),
        (b"]}X\x01\0\0\0aK\x01sb.", "no attribute"),
        (b"\x80\x06N.", "unsupported pickle protocol: 6"),
    ],
)
def test_nothing_else_than_plain_values_comes_out(data: bytes, says: str) -> None:
    assert says in error_of(data)


def test_an_extension_that_some_library_registered_is_refused_too() -> None:
    copyreg.add_extension(os.system.__module__, "system", 77)
    try:
        assert "call posix.system" in error_of(pickle.dumps(os.system, protocol=2))
    finally:
        copyreg.remove_extension(os.system.__module__, "system", 77)


def test_a_name_to_call_cannot_write_to_the_terminal() -> None:
    error = error_of(b"c\x1b[2Jos\n" + b"x" * 100_000 + b"\n.")
    assert error.isprintable()
    assert len(error) < 1000


# -- what asks for much ---------------------------------------------------------------------------

BLOCK = {"size": 512, "requested_size": 500, "address": 0, "state": "active_allocated", "frames": []}
SEGMENT = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "segment_type": "small", "blocks": [BLOCK]}
MEMORY, REPEATS = "more memory than a snapshot", "repeats a few values"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"]r\xff\xff\xff\x7f.", MEMORY),  # a memo of 32 GiB
        (b"]p99999999999999\n.", MEMORY),
        (b"\x8b\xff\xff\xff\x7f.", f"{MEMORY}|out of input|truncated"),  # a number of 2 GiB
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "overflow"),
        (b"I" + b"9" * 1_000_000 + b"\n.", "could not convert"),
        pytest.param(
            pickle.dumps({"segments": [{**SEGMENT, "blocks": [BLOCK] * 4000}] * 4000}), MEMORY, marks=pytest.mark.full
        ),
        (pickle.dumps({"segments": [{**SEGMENT, "blocks": [BLOCK] * 400}] * 400}), REPEATS),
    ],
)
def test_a_small_file_that_asks_for_much_is_an_error(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.pickle"
    path.write_bytes(data)
    spent, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(BrokenSnapshot, match=says):
        read_snapshot(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < spent + 400_000
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


# -- what is broken -------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_snapshot_cut_anywhere_is_a_clean_error(protocol: int) -> None:
    whole = pickle.dumps(small(), protocol=protocol)
    for length in range(1, len(whole)):
        assert "cut short or damaged" in error_of(whole[:length])


def gzipped(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(WHOLE))
    return path


def zipped(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", WHOLE)
    return path


def checkpoint(tmp_path: Path) -> Path:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "file")
    return tmp_path / "file"


def text(content: str) -> Any:
    def make(tmp_path: Path) -> Path:
        (tmp_path / "file").write_text(content)
        return tmp_path / "file"

    return make


def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "file")
    return tmp_path / "file"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (text(""), "empty"),
        (gzipped, "gunzip"),
        (zipped, "zip archive"),
        (checkpoint, "torch.save"),
        (text('{"traceEvents": []}'), "JSON"),
        (text("<html></html>"), "HTML"),
        (text("hello"), "damaged|cut"),
        (lambda tmp_path: tmp_path, "a directory"),
        (lambda tmp_path: Path("/dev/zero"), "no plain file"),
        (pipe, "no plain file"),
    ],
)
def test_another_kind_of_file_is_named(make: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises((BrokenSnapshot, IsADirectoryError), match=says):
        read_snapshot(make(tmp_path))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_snapshot(tmp_path / "absent.pickle")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "Expected `object`, got `int`"),
        ({}, "missing required field `segments`"),
        ({"model": {}, "optimizer": {}}, "missing required field `segments`"),
        ({"segments": 3}, "got `int` - at `$.segments`"),
        ({"segments": [], "\ud800": 3}, "surrogates not allowed"),
        ({"segments": ["x"]}, "got `str` - at `$.segments[0]`"),
        ({"segments": [{**SEGMENT, "blocks": {}}]}, "got `object` - at `$.segments[0].blocks`"),
        ({"segments": [{**SEGMENT, "total_size": "512"}]}, "got `str` - at `$.segments[0].total_size`"),
        ({"segments": [{**SEGMENT, "total_size": -1}]}, "`int` >= 0 - at `$.segments[0].total_size`"),
        ({"segments": [{**SEGMENT, "address": 2**200}]}, "- at `$.segments[0].address`"),
        ({"segments": [{**SEGMENT, "total_size": True}]}, "got `bool` - at `$.segments[0].total_size`"),
        ({"segments": [{**SEGMENT, "blocks": [{"state": "inactive"}]}]}, "missing required field `size`"),
        ({"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": 3}]}]}, "got `int` - at `$.frames`"),
        ({"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": [3]}]}]}, "got `int` - at `$.frames[0]`"),
        ({"segments": [], "device_traces": [3]}, "got `int` - at `$.device_traces[0]`"),
        ({"segments": [], "device_traces": [[3]]}, "got `int` - at `$.device_traces[0][0]`"),
        ({"segments": [], "device_traces": [[{"size": 1.5}]]}, "got `float` - at `$.device_traces[0][0].size`"),
    ],
)
def test_another_structure_is_an_error_that_says_what_is_wrong(value: object, says: str) -> None:
    error = error_of(pickle.dumps(value))
    assert error.startswith("is a pickle, but no memory snapshot: ")
    assert says in error


def test_what_holds_itself_is_an_error() -> None:
    segment: dict[str, Any] = {**SEGMENT}
    segment["blocks"] = [segment]
    bomb: list[Any] = []
    for _ in range(300):
        bomb = [bomb, bomb]
    for value in ([segment], {"segments": bomb}):
        assert error_of(pickle.dumps(value)).startswith("is a pickle, but no memory snapshot: ")


# -- what is read ---------------------------------------------------------------------------------


def test_segments_blocks_and_stacks_are_read_as_written() -> None:
    value = small()
    found = read(value)
    assert found.name == "snapshot.pickle"
    assert [segment.size_bytes for segment in found.segments] == [2 * MIB, 4 * MIB]
    first = found.segments[0].blocks[0]
    assert (first.size_bytes, first.requested_bytes, first.state) == (1024, 1000, "allocated")
    stack = found.stacks[first.stack].frames
    assert [one.name for one in stack] == ["forward", "_call_impl", "forward", "_call_impl", "main"]
    assert [one.action for one in found.events[0]] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    assert [one.size_bytes for one in found.events[0]] == [2 * MIB, 1000, 4 * MIB, 3 * MIB, 3 * MIB, 3 * MIB]
    assert found.settings["expandable_segments"] == "False"
    assert found.notes == ()


def test_equal_stacks_are_kept_once() -> None:
    found = read(snapshot(training()))
    assert len(found.events[0]) > 200
    assert len(found.stacks) < 10
    assert found.stacks[0] == Stack()


def test_a_stack_may_be_shared_by_more_entries_than_the_file_has_bytes_for() -> None:
    """torch shares the stack of an allocation with its frees and its block."""
    deep = [frame(f"/home/me/run/f{i}.py", i, "f") for i in range(100)]
    value = small()
    value["device_traces"] = [[{"action": "alloc", "addr": i, "size": 1, "frames": deep} for i in range(5000)]]
    found = read(value)
    assert found.file_bytes < 100 * 5000
    assert {len(found.stacks[number].frames) for number in {one.stack for one in found.events[0]}} == {100}


def test_a_bare_list_of_segments_is_read() -> None:
    """Of `torch.cuda.memory_snapshot()`, or an old torch: blocks of size and state only."""
    old = {key: SEGMENT[key] for key in ("device", "address", "total_size", "stream", "segment_type")}
    blocks = [{"size": 256, "state": "active_allocated"}, {"size": 512, "state": "active_allocated"}]
    found = read([{**old, "total_size": 1024, "blocks": [*blocks, {"size": 256, "state": "inactive"}]}])
    assert [block.requested_bytes for block in found.segments[0].blocks] == [256, 512, 0]
    assert [block.address for block in found.segments[0].blocks] == [0, 256, 768]
    assert found.events == {}
    assert found.notes == ()


def test_blocks_that_do_not_add_up_are_said() -> None:
    assert read([{**SEGMENT, "blocks": [{**BLOCK, "size": SEGMENT["total_size"] // 2}]}]).notes == (
        "1 segments have blocks that do not add up to their size",
    )


def test_none_is_what_is_not_known() -> None:
    known: dict[str, Any] = {"filename": "m.py", "line": 3, "name": "f", "fx_original_trace": ""}
    block = {**BLOCK, "size": SEGMENT["total_size"], "frames": [{**known, key: None} for key in known]}
    entry = {"action": "alloc", "addr": BLOCK["address"], "size": 1, "user_metadata": None}
    segment = {**SEGMENT, "segment_pool_id": None, "is_expandable": None, "blocks": [block]}
    found = read({"segments": [segment], "device_traces": [[entry]]})
    assert [(one.file, one.line, one.name) for one in found.stacks[found.segments[0].blocks[0].stack].frames] == [
        ("", 3, "f"), ("m.py", 0, "f"), ("m.py", 3, ""), ("m.py", 3, "f"),
    ]  # fmt: skip
    assert (found.stacks[0], found.notes) == (Stack(), ())
    (pool,) = allocator_report(found).devices[0].pools
    assert (pool.pool, pool.expandable) == ((0, 0), False)


def test_unknown_keys_and_actions_of_a_newer_torch_are_left_out() -> None:
    value = small()
    value["from_the_future"] = [[[1]]]
    value["segments"][0]["color"] = {"x": 1}
    value["device_traces"][0].append({"action": "segment_resize", "addr": 1, "size": 2})
    found = read(value)
    assert len(found.events[0]) == 6
    assert "1 entries of the history are of a kind that is not known" in found.notes[0]


def test_code_that_fx_made_leads_to_the_line_of_the_model() -> None:
    trace = '  File "/home/me/a.py", line 3, in main\n    x\n  File "/home/me/model.py", line 9, in forward\n    y'
    generated = {**frame("<eval_with_key>.1", 4, "forward"), "fx_node_op": "call", "fx_original_trace": trace}
    value = {"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": [generated]}]}]}
    found = read(value)
    assert found.stacks[1].frames[0].source == "/home/me/model.py:9 forward"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_file_holds_what_was_pickled(protocol: int, tmp_path: Path) -> None:
    """torch pads pickles that it puts into pages, and a path may have letters that are no text."""
    value = snapshot(training())
    value["segments"][0]["blocks"][0]["frames"] = [frame("/home/\ud800/naïve.py", 1, "f\0")]
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(value, protocol=protocol) + struct.pack("<I", 0))
    found, expected = read_snapshot(path), read(value)
    assert (found.name, found.file_bytes) == ("a.pickle", path.stat().st_size)
    for name in ("segments", "events", "stacks", "settings", "notes"):
        assert getattr(found, name) == getattr(expected, name)
