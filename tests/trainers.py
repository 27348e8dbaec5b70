"""What the tests of callbacks share: a small data set, and readers of what was logged."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TOKENS, REAL_TOKENS, VOCABULARY = 16, 12, 128
# FLOPs of forward and backward of one sequence of TOKENS of `models.build("llama")`, two layers of width 64.
PROJECTIONS = 64 * 64 + 2 * 64 * 32 + 64 * 64
FLOPS_OF_SEQUENCE = 3 * (2 * TOKENS * (2 * (PROJECTIONS + 3 * 64 * 128) + 64 * VOCABULARY) + 2 * 4 * TOKENS**2 * 64)


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of token ids, the last four of which are padding."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        mask = (torch.arange(TOKENS) < REAL_TOKENS).long()
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def logged_steps(output_dir: Path) -> list[list[dict[str, Any]]]:
    """The lines of every run's `perf_steps_*.jsonl`, oldest run first, without its head."""
    paths = sorted(output_dir.glob("logs/perf_monitor/perf_steps_*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    runs = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return [[line for line in run if "iteration" in line] for run in runs]


def scalars(directory: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of the TensorBoard events below a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for path in sorted(directory.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


def wandb_rows(directory: Path) -> list[list[dict[str, Any]]]:
    """The history of each offline run of W&B below a directory, once its process has written the end."""
    return [_history(path) for path in sorted(directory.rglob("run-*.wandb"))]


def _history(path: Path, patience_s: float = 120.0) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    until = time.monotonic() + patience_s
    while True:
        records = []
        for data in _wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
        if any(record.HasField("exit") for record in records) or time.monotonic() > until:
            rows = [record.history.item for record in records if record.HasField("history")]
            return [
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows
            ]
        time.sleep(0.1)


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a file of LevelDB's log format: blocks of 32 KiB, each piece behind its crc, length and type."""
    block, header, last_pieces = 32768, 7, (1, 4)
    at, record = header, b""  # the file has a header as long as that of a piece
    while at + header <= len(content):
        if block - at % block < header:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if at + header + length > len(content):
            return  # still being written
        record += content[at + header : at + header + length]
        at += header + length
        if kind in last_pieces:
            yield record
            record = b""


__all__ = [
    "FLOPS_OF_SEQUENCE",
    "REAL_TOKENS",
    "TOKENS",
    "Sequences",
    "equal",
    "logged_steps",
    "scalars",
    "wandb_rows",
    "weights",
]
