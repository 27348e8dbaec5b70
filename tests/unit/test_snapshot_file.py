"""Reading a snapshot: every version's structure, and nothing that a hostile or broken file could do."""

from __future__ import annotations

import contextlib
import copyreg
import gzip
import io
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.errors import BrokenSnapshot, ProfilerWrapperError
from profiler_wrapper.recording.plain_pickle import NotPlain, load_plain
from profiler_wrapper.recording.snapshot_file import read_snapshot
from profiler_wrapper.recording.snapshot_records import ACTIONS
from snapshots import MAIN, MIB, MLP_STACK, FakeAllocator, frame, snapshot, training, write


def small() -> dict[str, Any]:
    gpu = FakeAllocator()
    gpu.malloc(1000, MLP_STACK)
    gpu.free(gpu.malloc(3 * MIB, [MAIN]))
    return snapshot(gpu)


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def pickled_with_persistent_id(value: object) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, item: object) -> object:
            return "storage" if item == 12345 else None

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


# -- plain values ---------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=30,
)


@given(PLAIN, st.integers(0, 5))
def test_plain_values_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    assert load_plain(data) == pickle.loads(data) == value


@given(PLAIN, st.integers(0, 5))
def test_optimized_pickles_read_too(value: object, protocol: int) -> None:
    assert load_plain(pickletools.optimize(pickle.dumps(value, protocol=protocol))) == value


def test_values_shared_in_the_file_are_shared_in_memory() -> None:
    one: list[int] = [1]
    first, second = load_plain(pickle.dumps([one, one]))
    assert first is second


def test_what_holds_itself_is_read_and_not_walked() -> None:
    itself: list[Any] = []
    itself.append(itself)
    read = load_plain(pickle.dumps(itself))
    assert read[0] is read


@pytest.mark.parametrize("protocol", range(6))
def test_many_shared_values_come_back_in_their_places(protocol: int) -> None:
    """More of them than one byte can number: both opcodes that fetch a value stand beside one another."""
    words = [f"word {i}" for i in range(600)]
    lists = [[words[(i * k) % 600] for i in range(40)] for k in range(1, 30)]
    assert load_plain(pickle.dumps([words, lists], protocol=protocol)) == [words, lists]


@given(st.binary(max_size=200))
def test_any_bytes_are_plain_values_or_a_clean_error(data: bytes) -> None:
    try:
        load_plain(data)
    except NotPlain as error:
        assert 0 <= error.offset <= len(data)


@given(st.lists(st.sampled_from([op.code.encode("latin1") for op in pickletools.opcodes]), max_size=40), st.binary())
def test_any_opcodes_are_plain_values_or_a_clean_error(codes: list[bytes], rest: bytes) -> None:
    with contextlib.suppress(NotPlain):
        load_plain(b"".join(codes) + rest)


@pytest.mark.parametrize(
    "data",
    [
        b"]r\xff\xff\xff\x7f.",  # would make pickle.loads ask for 32 GiB
        b"]p99999999999999\n.",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x8b\xff\xff\xff\x7f.",
        b"I" + b"9" * 1_000_000 + b"\n.",
        b"L" + b"9" * 1_000_000 + b"L\n.",
        b"(" * 100_000,
        b"]" * 100_000 + b"a" * 99_999 + b"b",
        b"\x80\x06N.",
        b"h\x05.",
        b"t.",
        b"(KKs.",
        b".",
    ],
)
def test_small_files_that_ask_for_much_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(NotPlain):
        load_plain(data)


def test_keys_chosen_to_collide_are_refused() -> None:
    with pytest.raises(NotPlain, match="int as key"):
        load_plain(pickle.dumps({2**61 - 1: 0, 2 * (2**61 - 1): 0}))


# -- what wants to be run -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Calls(os.system, "touch {there}"), "system"),
        (Calls(eval, "open('{there}', 'w')"), "eval"),
        (Calls(exec, "open('{there}', 'w')"), "exec"),
        (np.arange(3), "numpy"),
        (np.int64(3), "numpy"),
        (torch.zeros(2), "torch"),
        (Path("x"), "Path"),
        (Calls, "Calls"),
        (torch.float32, "torch"),
    ],
)
def test_a_file_that_wants_to_call_something_is_refused(value: Any, named: str, protocol: int, tmp_path: Path) -> None:
    there = tmp_path / "there"
    if isinstance(value, Calls):
        value = Calls(value.function, value.arguments[0].format(there=there))
    path = write({**small(), "segments": [value]}, tmp_path / "evil.pickle", protocol=protocol)
    with pytest.raises(BrokenSnapshot, match=rf"evil\.pickle .*at byte \d+: it wants to call .*{named}.*refused"):
        read_snapshot(path)
    assert not there.exists()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (pickled_with_persistent_id([12345]), "a persistent id"),
        (b"Pstorage\n.", "a persistent id"),
        (b"\x82\x01.", "an extension code"),
        (b"\x83\x01\x00.", "an extension code"),
        (b"\x84\x01\x00\x00\x00.", "an extension code"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "string of Python 2"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"K\x01K\x02\x93.", "?.?"),
        (b"]]R.", "a call"),
        (b"]]b.", "a call"),
        (b"]]\x81.", "a call"),
        (pickle.dumps(b"bytes"), "bytes"),
        (pickle.dumps({1, 2}), "a set"),
        (pickle.dumps(bytearray(b"x"), protocol=5), "bytes"),
    ],
)
def test_opcodes_that_no_snapshot_has_are_refused(data: bytes, what: str, tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(data)
    with pytest.raises(BrokenSnapshot) as error:
        read_snapshot(path)
    assert what in str(error.value)
    assert "refused" in str(error.value)


def test_an_extension_that_some_library_registered_is_refused_too() -> None:
    copyreg.add_extension(os.system.__module__, "system", 77)
    try:
        data = pickle.dumps(os.system, protocol=2)
        with pytest.raises(NotPlain, match=r"an extension code"):
            load_plain(data)
    finally:
        copyreg.remove_extension(os.system.__module__, "system", 77)


def test_a_name_to_call_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(b"c\x1b[2Jos\n" + b"x" * 100_000 + b"\n.")
    with pytest.raises(BrokenSnapshot) as error:
        read_snapshot(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


# -- what is broken -------------------------------------------------------------------------------


def test_a_snapshot_cut_anywhere_is_a_clean_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.pickle"
    for protocol in (2, 4):
        whole = pickle.dumps(small(), protocol=protocol)
        assert len(whole) < 4000
        for length in range(len(whole)):
            with pytest.raises(NotPlain):
                load_plain(whole[:length])
        for length in range(0, len(whole), 17):
            path.write_bytes(whole[:length])
            with pytest.raises(BrokenSnapshot, match=r"cut\.pickle"):
                read_snapshot(path)


@given(st.data())
def test_a_damaged_snapshot_is_read_or_a_clean_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(whole)
    try:
        read_snapshot(path)
    except ProfilerWrapperError as error:
        assert "damaged.pickle" in str(error)


WHOLE = pickle.dumps(small())


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


BLOCK = {"size": 512, "requested_size": 500, "address": 0, "state": "active_allocated", "frames": []}
SEGMENT = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "segment_type": "small", "blocks": [BLOCK]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "a int"),
        ({}, "an empty dict"),
        ({"model": {}, "optimizer": {}}, "'model', 'optimizer'"),
        ({"segments": 3}, "'segments'"),
        ({"segments": ["x"]}, "a segment is a str"),
        ({"segments": [{**SEGMENT, "blocks": {}}]}, "'blocks'"),
        ({"segments": [{**SEGMENT, "total_size": "512"}]}, "'total_size' is a str"),
        ({"segments": [{**SEGMENT, "total_size": -1}]}, "'total_size' is negative"),
        ({"segments": [{**SEGMENT, "address": 2**200}]}, "'address'"),
        ({"segments": [{**SEGMENT, "total_size": True}]}, "'total_size' is a bool"),
        ({"segments": [{**SEGMENT, "blocks": [{"state": "inactive"}]}]}, "a block without 'size'"),
        ({"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": 3}]}]}, "a stack is a int"),
        ({"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": [3]}]}]}, "a frame is a int"),
        ({"segments": [], "device_traces": [3]}, "history is a int"),
        ({"segments": [], "device_traces": [[3]]}, "an entry of a history is a int"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "addr": 0, "size": 1.5}]]}, "'size' is a float"),
    ],
)
def test_another_structure_is_an_error_that_says_what_is_wrong(value: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenSnapshot, match="is a pickle, but no memory snapshot") as error:
        read_snapshot(write(value, tmp_path / "other.pickle"))
    assert says in str(error.value)


def test_a_file_that_names_few_values_a_billion_times_is_refused(tmp_path: Path) -> None:
    """2000 segments, all the same one, of 2000 blocks, all the same one."""
    segment = {**SEGMENT, "blocks": [BLOCK] * 2000}
    with pytest.raises(BrokenSnapshot, match="repeats a few values"):
        read_snapshot(write({"segments": [segment] * 2000}, tmp_path / "bomb.pickle"))


def test_lists_that_double_ten_thousand_times_are_no_snapshot(tmp_path: Path) -> None:
    bomb: list[Any] = []
    for _ in range(300):
        bomb = [bomb, bomb]
    with pytest.raises(BrokenSnapshot):
        read_snapshot(write({"segments": bomb}, tmp_path / "bomb.pickle"))


def test_a_segment_that_holds_itself_is_an_error(tmp_path: Path) -> None:
    segment: dict[str, Any] = {**SEGMENT}
    segment["blocks"] = [segment]
    with pytest.raises(BrokenSnapshot):
        read_snapshot(write([segment], tmp_path / "itself.pickle"))


# -- what is read ---------------------------------------------------------------------------------


def test_segments_blocks_and_stacks_are_read_as_written(tmp_path: Path) -> None:
    value = small()
    read = read_snapshot(write(value, tmp_path / "small.pickle"))
    assert read.name == "small.pickle"
    assert [segment.size_bytes for segment in read.segments] == [2 * MIB, 4 * MIB]
    first = read.segments[0].blocks[0]
    assert (first.size_bytes, first.requested_bytes, first.state) == (1024, 1000, "allocated")
    assert [one.name for one in read.stacks[first.stack]] == ["forward", "_call_impl", "forward", "_call_impl", "main"]
    assert [ACTIONS[i] for i in read.events[0].action] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed",
    ]  # fmt: skip
    assert read.events[0].size_bytes.tolist() == [2 * MIB, 1000, 4 * MIB, 3 * MIB, 3 * MIB, 3 * MIB]
    assert read.settings["expandable_segments"] == "False"
    assert read.notes == ()


def test_equal_stacks_are_kept_once(tmp_path: Path) -> None:
    read = read_snapshot(write(snapshot(training()), tmp_path / "a.pickle"))
    assert len(read.events[0]) > 200
    assert len(read.stacks) < 10
    assert read.stacks[0] == ()


def test_a_stack_may_be_shared_by_more_entries_than_the_file_has_bytes_for(tmp_path: Path) -> None:
    """torch shares the stack of an allocation with its frees and its block."""
    deep = [frame(f"/home/me/run/f{i}.py", i, "f") for i in range(100)]
    value = small()
    value["device_traces"] = [[{"action": "alloc", "addr": i, "size": 1, "frames": deep} for i in range(5000)]]
    path = write(value, tmp_path / "shared.pickle")
    assert path.stat().st_size < 100 * 5000
    read = read_snapshot(path)
    assert {len(read.stacks[number]) for number in read.events[0].stack} == {100}


def test_a_bare_list_of_segments_of_an_old_torch_is_read(tmp_path: Path) -> None:
    """torch 1.x: blocks of size and state only; 1.13: with a history that holds the stack."""
    old = {key: SEGMENT[key] for key in ("device", "address", "total_size", "stream", "segment_type")}
    history = [{"addr": 0, "real_size": 300, "frames": [MAIN]}, {"addr": 0, "real_size": 9, "frames": []}]
    blocks = [
        {"size": 256, "state": "active_allocated"},
        {"size": 512, "state": "active_allocated", "history": history},
        {"size": 256, "state": "inactive"},
    ]
    read = read_snapshot(write([{**old, "total_size": 1024, "blocks": blocks}], tmp_path / "old.pickle", protocol=2))
    assert [block.requested_bytes for block in read.segments[0].blocks] == [256, 300, 0]
    assert [block.address for block in read.segments[0].blocks] == [0, 256, 768]
    assert [len(read.stacks[block.stack]) for block in read.segments[0].blocks] == [0, 1, 0]
    assert read.events == {}
    assert read.notes == ("1 blocks do not say what was asked for; their size is taken",)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    segment = {"total_size": 1024, "blocks": [{"size": 512, "state": "strange"}]}
    notes = " ".join(read_snapshot(write({"segments": [segment]}, tmp_path / "a.pickle")).notes)
    for what in (
        "no address",
        "not name their device",
        "not name their stream",
        "state that is not known",
        "not add up",
    ):
        assert what in notes


def test_unknown_keys_and_actions_of_a_newer_torch_are_left_out(tmp_path: Path) -> None:
    value = small()
    value["from_the_future"] = [[[1]]]
    value["segments"][0]["color"] = {"x": 1}
    value["device_traces"][0].append({"action": "segment_resize", "addr": 1, "size": 2})
    read = read_snapshot(write(value, tmp_path / "new.pickle"))
    assert len(read.events[0]) == 6
    assert "1 entries of the history are of a kind that is not known" in read.notes[0]


def test_code_that_fx_made_leads_to_the_line_of_the_model(tmp_path: Path) -> None:
    trace = '  File "/home/me/a.py", line 3, in main\n    x\n  File "/home/me/model.py", line 9, in forward\n    y'
    generated = {**frame("<eval_with_key>.1", 4, "forward"), "fx_node_op": "call", "fx_original_trace": trace}
    value = {"segments": [{**SEGMENT, "blocks": [{**BLOCK, "frames": [generated]}]}]}
    read = read_snapshot(write(value, tmp_path / "fx.pickle"))
    assert read.stacks[1][0].source == "/home/me/model.py:9 forward"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_gives_the_same(protocol: int, tmp_path: Path) -> None:
    read = read_snapshot(write(small(), tmp_path / "a.pickle", protocol=protocol))
    assert read.segments == read_snapshot(write(small(), tmp_path / "b.pickle")).segments


def test_what_follows_the_pickle_is_left_alone(tmp_path: Path) -> None:
    """torch pads pickles that it puts into pages."""
    path = tmp_path / "padded.pickle"
    path.write_bytes(WHOLE + struct.pack("<I", 0))
    assert len(read_snapshot(path).segments) == 2
