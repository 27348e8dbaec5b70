"""Memory snapshots as torch writes them, from a caching allocator of a few lines that keeps its own books.

The structure is that of `THCPModule_memorySnapshot` (torch/csrc/cuda/Module.cpp): sizes in a history are those asked
for, frees carry the same size, and blocks of a segment have no gaps.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkout  # noqa: F401

if TYPE_CHECKING:
    from profiler_wrapper.snapshot.analyse import AllocatorReport
    from profiler_wrapper.snapshot.read import MemorySnapshot

MIB = 1 << 20
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/"

Frame = dict[str, Any]


def frame(file: str, line: int, name: str) -> Frame:
    return {"filename": file, "line": line, "name": name}


MAIN = frame("/home/me/run/train.py", 40, "main")
MODULE_CALL = frame(f"{TORCH}nn/modules/module.py", 1775, "_call_impl")
LINEAR = frame(f"{TORCH}nn/modules/linear.py", 134, "forward")
MLP = frame("/home/me/run/model.py", 12, "forward")
ATTENTION = frame("/home/me/run/model.py", 31, "forward")
ADAM = frame(f"{TORCH}optim/adam.py", 166, "_init_group")
STEP = frame("/home/me/run/train.py", 44, "main")
BACKWARD = frame(f"{TORCH}autograd/__init__.py", 354, "backward")
INIT = frame("/home/me/run/model.py", 5, "__init__")

MLP_STACK = [LINEAR, MODULE_CALL, MLP, MODULE_CALL, MAIN]
ATTENTION_STACK = [ATTENTION, MODULE_CALL, MAIN]
ADAM_STACK = [ADAM, STEP]
INIT_STACK = [INIT, MAIN]
BACKWARD_STACK: list[Frame] = []  # autograd's own thread


@dataclass
class FakeAllocator:
    """One device. Small requests share segments of 2 MiB, large ones get segments of their own size."""

    device: int = 0
    round_to: int = 512
    expandable: bool = False
    total_bytes: int = 1 << 40
    segments: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)  # address -> asked for
    books: list[tuple[int, int]] = field(default_factory=list)  # after each entry: asked for, reserved
    next_address: int = 0x7F00_0000_0000
    time_us: int = 1_700_000_000_000_000

    def malloc(
        self, size: int, frames: list[Frame], *, stream: int = 0, pool: tuple[int, int] = (0, 0), text: str = ""
    ) -> int | None:
        """An address, or None after an `oom` entry."""
        frames = list(frames)  # each allocation has a stack of its own, of frames that all share
        given = -(-size // self.round_to) * self.round_to
        found = self._fit(given, stream, pool)
        if found is None:
            kind, whole = ("small", 2 * MIB) if given <= MIB else ("large", -(-given // (2 * MIB)) * 2 * MIB)
            if self.reserved + whole > self.total_bytes:
                self._note("oom", frames, size=given, stream=stream, device_free=self.total_bytes - self.reserved)
                return None
            found = self._new_segment(kind, whole, frames, stream, pool)
        segment, index = found
        block = segment["blocks"][index]
        rest = block["size"] - given
        block.update(size=given, requested_size=size, state="active_allocated", frames=frames)
        if rest:
            free = {"address": block["address"] + given, "size": rest, "requested_size": 0, "state": "inactive"}
            segment["blocks"].insert(index + 1, {**free, "frames": []})
        self.live[block["address"]] = size
        self._note("alloc", frames, addr=block["address"], size=size, stream=stream, text=text)
        return int(block["address"])

    def free(self, address: int | None, *, complete: bool = True) -> None:
        assert address is not None
        segment, index = self._block(address)
        block, size = segment["blocks"][index], self.live[address]
        self._note("free_requested", block["frames"], addr=address, size=size, stream=segment["stream"])
        block["state"] = "active_pending_free"
        if complete:
            del self.live[address]
            self._note("free_completed", block["frames"], addr=address, size=size, stream=segment["stream"])
            block.update(state="inactive", requested_size=0, frames=[])
            self._merge(segment)

    def empty_cache(self) -> None:
        for segment in [one for one in self.segments if [b["state"] for b in one["blocks"]] == ["inactive"]]:
            self.segments.remove(segment)
            what = "segment_unmap" if segment["is_expandable"] else "segment_free"
            self._note(what, [MAIN], addr=segment["address"], size=segment["total_size"], stream=segment["stream"])

    @property
    def reserved(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    def _fit(self, given: int, stream: int, pool: tuple[int, int]) -> tuple[dict[str, Any], int] | None:
        kind = "small" if given <= MIB else "large"
        for segment in self.segments:
            if (segment["stream"], segment["segment_pool_id"], segment["segment_type"]) != (stream, pool, kind):
                continue
            for index, block in enumerate(segment["blocks"]):
                if block["state"] == "inactive" and block["size"] >= given:
                    return segment, index
        return None

    def _new_segment(
        self, kind: str, whole: int, frames: list[Frame], stream: int, pool: tuple[int, int]
    ) -> tuple[dict[str, Any], int]:
        address, self.next_address = self.next_address, self.next_address + whole + 32 * MIB
        block = {"address": address, "size": whole, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": self.device, "address": address, "total_size": whole, "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": stream, "segment_type": kind, "segment_pool_id": pool,
            "is_expandable": self.expandable, "frames": frames, "blocks": [block],
        }  # fmt: skip
        self.segments.append(segment)
        self._note(
            "segment_map" if self.expandable else "segment_alloc", frames, addr=address, size=whole, stream=stream
        )
        return segment, 0

    def _merge(self, segment: dict[str, Any]) -> None:
        merged: list[dict[str, Any]] = []
        for block in segment["blocks"]:
            if merged and merged[-1]["state"] == block["state"] == "inactive":
                merged[-1]["size"] += block["size"]
            else:
                merged.append(block)
        segment["blocks"] = merged

    def _block(self, address: int) -> tuple[dict[str, Any], int]:
        for segment in self.segments:
            for index, block in enumerate(segment["blocks"]):
                if block["address"] == address:
                    return segment, index
        raise KeyError(address)

    def _note(self, action: str, frames: list[Frame], *, text: str = "", **values: int) -> None:
        self.time_us += 250
        self.trace.append(
            {"action": action, **values, "time_us": self.time_us, "compile_context": "N/A", "user_metadata": text}
            | ({"frames": frames} if frames else {})
        )
        self.books.append((sum(self.live.values()), self.reserved))

    def finish(self) -> None:
        """Fill in the sums that torch writes for each segment."""
        for segment in self.segments:
            held = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
            active = [block for block in segment["blocks"] if block["state"] != "inactive"]
            segment["allocated_size"] = sum(block["size"] for block in held)
            segment["active_size"] = sum(block["size"] for block in active)
            segment["requested_size"] = sum(block["requested_size"] for block in active)


def snapshot(*allocators: FakeAllocator, max_entries: int | None = None, settings: str = "") -> dict[str, Any]:
    """What `torch.cuda.memory._snapshot()` returns; of each history the last `max_entries`."""
    for allocator in allocators:
        allocator.finish()
    traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max(one.device for one in allocators))]
    for allocator in allocators:
        traces[allocator.device] = allocator.trace[-max_entries:] if max_entries else allocator.trace
    return {
        "segments": [segment for allocator in allocators for segment in allocator.segments],
        "device_traces": traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings, "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": any(one.expandable for one in allocators), "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False, "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {"1": 0, "2": 0, "4": 0}, "graph_capture_record_stream_reuse": False,
        },
        "external_annotations": [{"name": "Optimizer.step", "stage": "START", "device": 0, "time_us": 1}],
    }  # fmt: skip


def training(*, layers: int = 4, steps: int = 3, total_mib: int = 96, leak: bool = True) -> FakeAllocator:
    """Training steps that keep more and more, until an allocation cannot be met."""
    gpu = FakeAllocator(total_bytes=total_mib * MIB)
    parameters = [gpu.malloc(MIB + 1000, INIT_STACK, text="params") for _ in range(layers)]
    gpu.malloc(256 * 1024, INIT_STACK, stream=7)  # a side stream
    gpu.malloc(3 * MIB, INIT_STACK, pool=(0, 1))  # a CUDA graph's
    for step in range(steps):
        kept = []
        for layer in range(layers):
            kept.append(gpu.malloc(2 * MIB + 100 * layer, MLP_STACK))
            scores = gpu.malloc(4 * MIB, ATTENTION_STACK)
            kept.append(gpu.malloc(300_000, ATTENTION_STACK))
            if scores is None:
                return gpu
            if leak:
                gpu.malloc(MIB, [frame("/home/me/run/train.py", 51, "log_losses"), MAIN])
            gpu.free(scores)
        gradients = []
        for address in reversed(kept):
            gradients.append(gpu.malloc(MIB // 4, BACKWARD_STACK))
            if address is not None:
                gpu.free(address)
        if step == 0:
            for _ in parameters:
                gpu.malloc(2 * MIB, ADAM_STACK)
        for address in gradients:
            if address is not None:
                gpu.free(address)
    return gpu


def read(value: object) -> MemorySnapshot:
    """As `read_snapshot` reads the pickle of `value`, but without a file."""
    from profiler_wrapper.snapshot.read import snapshot_of

    return snapshot_of(value, file_bytes=len(pickle.dumps(value)), name="snapshot.pickle")


def write(value: object, path: Path, *, protocol: int | None = None) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


if __name__ == "__main__":
    import sys

    print(write(snapshot(training()), Path(sys.argv[1] if len(sys.argv) > 1 else "snapshot.pickle")))


def report_of(value: object) -> AllocatorReport:
    """What is told of a snapshot of these values."""
    from profiler_wrapper.snapshot.analyse import allocator_report

    return allocator_report(read(value))
