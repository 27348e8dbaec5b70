"""Analyse any torch.profiler trace: without one, a bare profile is made first, as somebody else would.

    python examples/03_analyze_a_trace.py [TRACE] [--output-dir outputs]

Look at the names: with stacks in the trace, layers are known by class and number though nothing of ours was there.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile

import profiler_wrapper as pw


def somebody_elses_trace(output_dir: Path) -> Path:
    """A forward recorded without a word of ours: layers come from torch's own `nn.Module:` events."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4)
    with profile(with_stack=True) as profiler, torch.no_grad():
        model(torch.randn(2, 32, 64))
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / "somebody_elses.pt.trace.json"
    profiler.export_chrome_trace(str(path))
    return path


def main(trace: Path | None, output_dir: Path) -> None:
    result = pw.load(trace or somebody_elses_trace(output_dir))
    print(result)

    by_kind: Counter[str] = Counter()
    for row in result.layers:
        by_kind[row.kind] += row.self_time_ns
    print("\nself time by kind of layer:")
    for kind, time_ns in by_kind.most_common():
        print(f"  {kind:10s} {time_ns / 1e6:9.3f} ms  {time_ns / result.time.total_ns:6.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    options = parser.parse_args()
    main(options.trace, options.output_dir)
