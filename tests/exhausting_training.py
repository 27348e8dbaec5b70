"""Trains Llamas in processes whose memory is limited: `python exhausting_training.py DIRECTORY CASE[.REMEDY]...`.

Cases: `logits` (a large vocabulary), `blocks` (many blocks), `later` (a huge tensor after the recording).
Remedies: `half` of the batch, `checkpoint`. A training is a fork of the process that imported what all need, which
takes longer than to train; it has DIRECTORY/CASE[.REMEDY] for its run, `stderr` and `ended`, the status it ended with.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import checkout  # noqa: F401
import profiler_wrapper as pw

MIB = 1 << 20
TOKENS = 256
CASES = {
    "logits": {"vocab_size": 100_000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "batch": 4},
    "blocks": {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 16, "batch": 16},
    "later": {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "batch": 1},
}
LIMIT_MIB = {"logits": 1150, "blocks": 330, "later": 3000}  # beyond what the process has before it trains


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt


def limit_memory(more_mib: int) -> None:
    """What is freed goes back to the system at once from now on, so that the limit is one on what is in use."""
    malloc = ctypes.CDLL(None)
    for option, value in ((_TRIM_THRESHOLD, 1 << 16), (_MMAP_THRESHOLD, 1 << 16), (_ARENA_MAX, 1)):
        assert malloc.mallopt(option, value) == 1
    malloc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_mib * MIB,) * 2)


def train(directory: Path, case: str, remedy: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = dict(CASES[case])
    batch = config.pop("batch") // (2 if remedy == "half" else 1)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **config))
    if remedy == "checkpoint":
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, config["vocab_size"], (batch, TOKENS))
    with torch.profiler.profile():  # what torch loads for it belongs to the process, not to the training
        model(input_ids=ids[:1, :8], labels=ids[:1, :8]).loss.backward()
    model.zero_grad()
    limit_memory(LIMIT_MIB[case])
    with pw.ProfilerWrapper(
        model, output_dir=directory, run_name="run", files=("trace", "result"), steps="0", enable_print_summary=False
    ) as prof:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
        if case == "later":
            torch.empty(LIMIT_MIB[case] * MIB, dtype=torch.uint8)


def main(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir()
        child = os.fork()
        if not child:
            said = os.open(directory / name / "stderr", os.O_CREAT | os.O_WRONLY)
            os.dup2(said, sys.stderr.fileno())
            case, _, remedy = name.partition(".")
            train(directory / name, case, remedy)
            return  # the process ends as one that only trained
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (directory / name / "ended").write_text(str(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
