"""What profilers say about the same runs, beside what is true: FLOPs, time and memory of layers, device time of traces.

The truths are independent of all of them, ours included: FLOPs are matrix products worked out by hand; time is that of
a wait planted in one layer's forward or backward, which notes how long it took; memory is the tensors that autograd
saves, by storage; device time is the sum and the union of kernels, copies and sets in the trace's JSON. Where another
tool is closer than ours is said at the end. A tool that is not installed is left out with a word, and "-" stands for
what a tool has no number for.

    python benchmarks/truth.py [TRACE ...] [--only flops] [--layers 4] [--hidden 256] [--tokens 128] [--json FILE]

Without a TRACE: those beside this checkout, if there are any. FLOPs are 2 per multiply-add. fvcore and torchinfo count
multiply-adds, and of DeepSpeed those are taken, as its FLOPs have elementwise ops in them: each is doubled. torchinfo
gives twice the bytes of outputs, "for gradients": half is taken. HTA gets `include_last_profiler_step=True`;
HTA 0.5 fails on some traces with pandas 3, so give it pandas 2.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import logging
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

import measuring
import models
import profiler_wrapper as pw
import saved_tensors
from profiler_wrapper.place.names import LAUNCHED_BEFORE, NO_LAUNCH
from profiler_wrapper.timer.layer_timer import LayerTimer

WRAPPER, TIMER = "ProfilerWrapper", "LayerTimer"
OURS = (WRAPPER, TIMER)
PACKAGES = ("deepspeed", "fvcore", "torchinfo", "torchprof", "HolisticTraceAnalysis", "TraceLens", "pandas")
DEEPSPEED, FVCORE, TORCHINFO, TORCHPROF = "DeepSpeed FlopsProfiler", "fvcore", "torchinfo", "torchprof"
COUNTER, TORCH, HTA, TRACELENS = "FlopCounterMode", "torch.profiler", "HTA", "TraceLens"

# What -> number, None where the tool has none, or a word; or why it said nothing at all.
Said = Mapping[str, float | str | None] | str


# --- putting claims beside a truth ------------------------------------------------------------------


def compare(
    report: measuring.Report,
    title: str,
    truth: Mapping[str, float],
    said: Mapping[str, Said],
    *,
    show: Callable[[float], str],
    alike: float = 0.0,
    alike_share: float = 0.0,
    note: str = "",
) -> list[str]:
    """A row for each number, with the claims of all tools; where another is closer than ours.

    alike, alike_share: an error is no larger than another by so much, or by this share of the truth.
    """
    rows, closer, data = [], [], {}
    for what, true in truth.items():
        claims = {tool: said_of(claim, what) for tool, claim in said.items()}
        data[what] = {"truth": true, **claims}
        rows.append(
            {"": what, "truth": show(true), **{tool: _cell(claim, true, show) for tool, claim in claims.items()}}
        )
        errors = {tool: abs(claim - true) for tool, claim in claims.items() if isinstance(claim, (int, float))}
        own = min((error for tool, error in errors.items() if tool in OURS), default=None)
        for tool, error in errors.items():
            if tool not in OURS and (own is None or error + max(alike, alike_share * abs(true)) < own):
                closer.append(f"{title}: {what}: {tool} is closer than ours")
    report.table(title, rows, note=note, data=data)
    return closer


def said_of(claim: Said, what: str) -> float | str | None:
    return claim if isinstance(claim, str) else claim.get(what)


def _cell(claim: float | str | None, true: float, show: Callable[[float], str]) -> str:
    if claim is None or isinstance(claim, str):
        return claim or "-"
    if claim == true:
        return "exact"
    if not true:
        return show(claim)
    percent = 100 * (claim / true - 1)
    return f"{show(claim)} ({percent:+.1f} %)" if abs(percent) >= 0.05 else f"{show(claim)} ({percent:+.1g} %)"


def from_peer(module: str, ask: Callable[[Any], Said]) -> Said:
    """What another tool says; a word where it is not installed, or fails."""
    found = measuring.torchprof() if module == "torchprof" else measuring.peer(module)
    if found is None:
        return measuring.NOT_INSTALLED
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return ask(found)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}".split("\n")[0][:60]


@contextlib.contextmanager
def ours(model: nn.Module | None, **options: Any) -> Iterator[pw.ProfilerWrapper]:
    """Records everything, with shapes; prints nothing."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"files": ("result",), "enable_print_summary": False, "background": False, "output_dir": folder}
        yield pw.ProfilerWrapper(model, steps="all", record_shapes=True, **(quiet | options))


# --- FLOPs ------------------------------------------------------------------------------------------

FORWARD, STEP, AGAIN = "forward", "step", "step, with what backward computes again"


def products(rows: int, weights: int) -> int:
    """FLOPs of `rows` rows through matrices of so many weights."""
    return 2 * rows * weights


def flops_by_hand(name: str, size: models.Size, *, fused: bool) -> dict[str, float]:
    """Of one training step of a model of tests/models.py.

    A product's backward is two more. A fused attention has one product more, the scores, which it computes again.
    """
    hidden, tokens = size.hidden, size.batch * size.tokens
    length, first = size.tokens, 0  # `first`: a product on the input, which has no gradient
    if name == "llama":  # keys and values are half as wide, the feed-forward is 2 * hidden
        linear = products(tokens, size.layers * (3 * hidden**2 + 6 * hidden**2) + hidden * size.vocabulary)
    elif name == "gpt2":
        linear = products(tokens, size.layers * 12 * hidden**2 + hidden * size.vocabulary)
    else:  # ViT: 16 patches of 3 * 4 * 4 and a class token; 3 classes
        length, first = 17, products(size.batch * 16, 3 * 4 * 4 * hidden)
        linear = products(size.batch * 17, size.layers * 8 * hidden**2) + products(size.batch, 3 * hidden)
    attention = size.layers * 2 * products(size.batch * length * length, hidden)
    forward = linear + first + attention
    step = forward + 2 * linear + first + 2 * attention
    return {FORWARD: forward, STEP: step, AGAIN: step + (attention // 2 if fused else 0)}


def block_flops_by_hand(size: models.Size, *, fused: bool) -> dict[str, float]:
    """Of the first block of the Llama."""
    rows, hidden = size.batch * size.tokens, size.hidden
    linear, attention = products(rows, 3 * hidden**2), 2 * products(size.batch * size.tokens**2, hidden)
    again = attention // 2 if fused else 0
    mlp = products(rows, 6 * hidden**2)
    return {
        "self_attn, forward": linear + attention,
        "self_attn, backward": 2 * (linear + attention) + again,
        "mlp, forward": mlp,
        "mlp, backward": 2 * mlp,
    }


def flops_of_ours(case: models.Case, first_block: str) -> dict[str, float | str | None]:
    optimizer = models.optimizer_of(case.model)
    with ours(case.model) as prof, prof:
        for _ in range(2):
            models.train_step(case, case.model, optimizer)
            prof.step()
    assert prof.result is not None
    rows = prof.result.flops
    hardware = sum(row.flops_per_step for row in rows)
    found: dict[str, float | str | None] = {
        FORWARD: sum(row.flops_per_step for row in rows if row.phase == "forward"),
        STEP: hardware - sum(row.repeated_flops_per_step for row in rows),
        AGAIN: hardware,
    }
    for part in ("self_attn", "mlp"):
        for row in prof.result.rows(f"{first_block}.{part}"):
            found[f"{part}, {row.phase}"] = row.flops_per_step
    return found


def flops_of_counter(case: models.Case, first_block: str) -> dict[str, float | str | None]:
    """torch's own counter. It counts what ran, so it has no number without what backward computes again."""
    with FlopCounterMode(display=False) as counter:
        loss = case.loss(case.model, case.batch(0))
        forward = {name: sum(of_ops.values()) for name, of_ops in counter.get_flop_counts().items()}
        loss.backward()
    case.model.zero_grad()
    whole = {name: sum(of_ops.values()) for name, of_ops in counter.get_flop_counts().items()}
    found: dict[str, float | str | None] = {FORWARD: forward["Global"], STEP: whole["Global"], AGAIN: whole["Global"]}
    for part in ("self_attn", "mlp"):
        name = f"{type(case.model).__name__}.{first_block}.{part}"
        found[f"{part}, forward"] = forward.get(name, 0)
        found[f"{part}, backward"] = whole.get(name, 0) - forward.get(name, 0)
    return found


def flops_of_torch(case: models.Case) -> dict[str, float | str | None]:
    """`with_flops` of torch.profiler."""

    def counted(run: Callable[[], object]) -> float:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as prof:
            run()
        return sum(event.flops or 0 for event in prof.key_averages())

    def step() -> None:
        case.loss(case.model, case.batch(0)).backward()

    found = {FORWARD: counted(lambda: case.loss(case.model, case.batch(0))), STEP: counted(step)}
    case.model.zero_grad()
    return {**found, AGAIN: found[STEP]}


def flops_of_deepspeed(module: Any, case: models.Case, first_block: str) -> dict[str, float | str | None]:
    profiler = module.FlopsProfiler(case.model)
    profiler.start_profile()
    try:
        case.loss(case.model, case.batch(0))
        found: dict[str, float | str | None] = {FORWARD: 2 * profiler.get_total_macs()}
        for part in ("self_attn", "mlp") if first_block else ():
            macs = module.get_module_macs(case.model.get_submodule(f"{first_block}.{part}"))
            found[f"{part}, forward"] = 2 * macs
    finally:
        profiler.end_profile()
    return found


class _ByPosition(nn.Module):
    """A model that is called by position, and returns its loss."""

    def __init__(self, case: models.Case, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self._case, self._names = case.model, case, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self._case.loss(self.model, dict(zip(self._names, values, strict=True)))


def flops_of_fvcore(module: Any, case: models.Case, first_block: str) -> dict[str, float | str | None]:
    batch = case.batch(0)
    count = module.FlopCountAnalysis(_ByPosition(case, list(batch)), tuple(batch.values()))
    count.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    by_module = count.by_module()
    parts = {part: by_module.get(f"model.{first_block}.{part}") for part in ("self_attn", "mlp")}
    return {
        FORWARD: 2 * count.total(),
        **{f"{part}, forward": None if macs is None else 2 * macs for part, macs in parts.items()},
    }


def flops_of_torchinfo(module: Any, case: models.Case) -> dict[str, float | str | None]:
    summary = module.summary(case.model, input_data=dict(case.batch(0)), verbose=0)
    return {FORWARD: 2 * summary.total_mult_adds}


def flops(report: measuring.Report, options: argparse.Namespace) -> list[str]:
    closer = []
    size = {"layers": options.layers, "hidden": options.hidden, "tokens": options.tokens}
    for name in ("llama", "gpt2", "vit"):
        for attention in ("eager", "sdpa"):
            case = models.build(name, attention=attention, **size)
            whole = models.Size(attention=attention, **size)
            fused = attention == "sdpa" and name != "gpt2"  # its dropout keeps a CPU from the fused one
            block = "model.layers.0" if name == "llama" else ""

            said: dict[str, Said] = {
                WRAPPER: flops_of_ours(case, block),
                COUNTER: flops_of_counter(case, block),
                f"{TORCH} with_flops": flops_of_torch(case),
                DEEPSPEED: from_peer(
                    "deepspeed.profiling.flops_profiler",
                    lambda found, case=case, block=block: flops_of_deepspeed(found, case, block),  # type: ignore[misc]
                ),
                FVCORE: from_peer(
                    "fvcore.nn",
                    lambda found, case=case, block=block: flops_of_fvcore(found, case, block),  # type: ignore[misc]
                ),
                TORCHINFO: from_peer("torchinfo", lambda found, case=case: flops_of_torchinfo(found, case)),  # type: ignore[misc]
            }
            title = f"MFLOPs of a step: {type(case.model).__name__}, {attention} attention"
            closer += compare(report, title, flops_by_hand(name, whole, fused=fused), said, show=_mega)
            if block:
                del said[f"{TORCH} with_flops"], said[TORCHINFO]  # nothing by layer
                title = f"MFLOPs of the first block: {type(case.model).__name__}, {attention} attention"
                closer += compare(report, title, block_flops_by_hand(whole, fused=fused), said, show=_mega)
    return closer


def _mega(count: float) -> str:
    return f"{count / 1e6:,.2f}"


# --- time -------------------------------------------------------------------------------------------


class _Planted(torch.autograd.Function):
    """Gives on what it is given, and waits in forward, in backward, or both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: WaitingLayer) -> torch.Tensor:
        ctx.layer = layer
        layer.wait("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.wait("backward")
        return gradients[0].clone(), None


class WaitingLayer(nn.Module):
    """A Linear, and a wait of so many seconds in forward and in backward; `waited` has how long they were.

    hold: waits for so many seconds. between_ops: the forward wait is in no op.
    """

    def __init__(
        self, hold: Callable[[float], None], forward: float, backward: float, *, between_ops: bool = False
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.waits, self.hold, self.between_ops = {"forward": forward, "backward": backward}, hold, between_ops
        self.waited: Counter[str] = Counter()

    def wait(self, phase: str) -> None:
        if self.waits[phase] and not (self.between_ops and phase == "forward"):
            self._wait(phase)

    def _wait(self, phase: str) -> None:
        start = time.perf_counter()
        self.hold(self.waits[phase])
        self.waited[phase] += time.perf_counter() - start  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _Planted.apply(self.linear(x), self)
        if self.between_ops and self.waits["forward"]:
            self._wait("forward")
        return x


class WaitingModel(nn.Module):
    """Layers that wait in turn: nowhere, in forward, in backward, in both, and in forward between two ops."""

    def __init__(self, hold: Callable[[float], None], seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            (
                WaitingLayer(hold, 0, 0),
                WaitingLayer(hold, seconds, 0),
                WaitingLayer(hold, 0, seconds),
                WaitingLayer(hold, seconds, 2 * seconds),
                WaitingLayer(hold, seconds, 0, between_ops=True),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def waited(self) -> dict[str, float]:
        """Seconds by layer and phase since it was last asked."""
        found = {}
        for number, layer in enumerate(self.layers):
            for phase in ("forward", "backward"):
                found[f"layers.{number}, {phase}"] = layer.waited.pop(phase, 0.0)
        return found


def spin(seconds: float) -> None:
    """Keep the CPU busy for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _run(model: nn.Module, steps: int, after_step: Callable[[], None] | None = None) -> None:
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        if after_step is not None:
            after_step()


def time_of_ours(model: WaitingModel, steps: int) -> tuple[dict[str, float | str | None], dict[str, float]]:
    """CPU time of ops of each layer, a step; and what was waited while they were recorded."""
    with ours(model) as prof, prof:
        _run(model, 1, prof.step)
        model.waited()
        _run(model, steps, prof.step)
    result = prof.result
    assert result is not None
    truth = model.waited()
    found: dict[str, float | str | None] = {}
    for what in truth:
        layer, phase = what.split(", ")
        rows = [row for row in result.rows(layer) if row.phase == phase]
        found[what] = sum(sum(row.step_times_ns[1:]) for row in rows) / 1e9
    return found, truth


def time_of_timer(model: WaitingModel, steps: int) -> tuple[dict[str, float | str | None], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        with LayerTimer(model, folder) as timer:
            _run(model, 1, timer.step)
            model.waited()
            _run(model, steps, timer.step)
        truth = model.waited()
        lines = [json.loads(line) for path in Path(folder).rglob("*.jsonl") for line in path.read_text().splitlines()]
    lines = [line for line in lines if "duration_ns" in line and line.get("layer")]
    first = min(line["step"] for line in lines)
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line["step"] > first:
            found[f"{line['layer']}, {line['kind']}"] += line["duration_ns"] / 1e9
    return {what: found.get(what) for what in truth}, truth


def time_of_torch(model: WaitingModel, steps: int) -> tuple[dict[str, float | str | None], dict[str, float]]:
    """`key_averages()`, with a `record_function` around each layer's forward, as its users put them."""
    plain = [layer.forward for layer in model.layers]

    def named(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with record_function(name):
                return forward(*args)

        return call

    for number, layer in enumerate(model.layers):
        layer.forward = named(f"layers.{number}", plain[number])
    try:
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            _run(model, steps)
    finally:
        for layer in model.layers:
            del layer.forward
    truth = model.waited()
    of_name = {event.key: event.cpu_time_total / 1e6 for event in prof.key_averages()}
    return {what: of_name.get(what.removesuffix(", forward")) for what in truth}, truth


def time_of_torchprof(module: Any, model: WaitingModel, steps: int) -> dict[str, float | str | None]:
    paths = [(type(model).__name__, "layers", str(number)) for number in range(len(model.layers))]
    with module.Profile(model, paths=paths) as prof:
        _run(model, steps)
    _, events = prof.raw()
    return {
        f"layers.{number}, forward": sum(event.self_cpu_time_total for call in events[path] for event in call) / 1e6
        for number, path in enumerate(paths)
    }


def time_of_deepspeed(module: Any, model: WaitingModel, steps: int) -> dict[str, float | str | None]:
    profiler = module.FlopsProfiler(model)
    profiler.start_profile()
    try:
        _run(model, steps)
        return {
            f"layers.{number}, forward": module.get_module_duration(layer) for number, layer in enumerate(model.layers)
        }
    finally:
        profiler.end_profile()


def times(report: measuring.Report, options: argparse.Namespace) -> list[str]:
    model, steps = WaitingModel(spin, options.wait / 1e3), 4
    _run(model, 2)
    model.waited()
    said: dict[str, Said] = {}
    waited: dict[str, dict[str, float]] = {}
    for tool, ask in {WRAPPER: time_of_ours, TIMER: time_of_timer, f"{TORCH} key_averages": time_of_torch}.items():
        said[tool], waited[tool] = ask(model, steps)
    for tool, name, ask in (
        (TORCHPROF, "torchprof", time_of_torchprof),
        (DEEPSPEED, "deepspeed.profiling.flops_profiler", time_of_deepspeed),
    ):
        said[tool] = from_peer(name, lambda module, ask=ask: ask(module, model, steps))  # type: ignore[misc]
        waited[tool] = model.waited()
    truth = {what: seconds / steps for what, seconds in waited[WRAPPER].items()}
    for tool, claims in said.items():
        if not isinstance(claims, str):
            said[tool] = {what: _of_a_step(claims.get(what), waited[tool][what], truth[what], steps) for what in truth}
    return compare(
        report,
        "Time of layers, ms a step",
        truth,
        said,
        show=lambda seconds: f"{seconds * 1e3:.2f}",
        alike=0.5e-3,
        note=f"A wait of {options.wait:g} ms in the forward of layers.1, in the backward of layers.2, in the forward "
        "and twice in the backward of layers.3, all within ops; in the forward of layers.4 between two ops, which is "
        f"no op's time. Over {steps} steps. What a Linear takes beside it is a tenth of a millisecond; errors that "
        "differ by less than half a millisecond count as alike.",
    )


def _of_a_step(claim: float | None, waited: float, true: float, steps: int) -> float | None:
    """As if the tool had seen the waits of the truth: its own were longer or shorter by a little."""
    if claim is None:
        return None
    return claim / waited * true if waited else claim / steps


# --- memory -----------------------------------------------------------------------------------------


class _Kept(torch.autograd.Function):
    """Gives on what it is given, and keeps so many bytes for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size, dtype=torch.uint8, device=x.device))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].clone(), None


class KeepingLayer(nn.Module):
    """A Linear, and a tensor of so many bytes that is kept for backward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(8, 8), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Kept.apply(self.linear(x), self.size)  # type: ignore[no-any-return]


class KeepingModel(nn.Module):
    """Two layers; the second keeps `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList((KeepingLayer(1), KeepingLayer(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def memory_truth(model: nn.Module, run: Callable[[], torch.Tensor], layers: Sequence[str]) -> dict[str, float]:
    """Bytes kept for backward by each layer, by storage."""
    with saved_tensors.SavedTensorTruth(model) as truth:
        loss = run()
    loss.backward()
    return {layer: truth.mean_bytes(layer) for layer in layers}


def memory_of_ours(
    model: nn.Module, run: Callable[[], torch.Tensor], layers: Sequence[str]
) -> dict[str, float | str | None]:
    with ours(model) as prof, prof:
        for _ in range(2):
            run().backward()
            prof.step()
    assert prof.result is not None
    return {
        row.layer: row.retained_bytes for row in prof.result.layers if row.phase == "forward" and row.layer in layers
    }


def memory_of_torch(
    model: nn.Module, run: Callable[[], torch.Tensor], layers: Sequence[str]
) -> dict[str, float | str | None]:
    """What `key_averages()` says was allocated and not freed within a `record_function` around each layer."""
    handles, open_ = [], []
    for name, module in model.named_modules():
        if (name or type(model).__name__) in layers:

            def enter(_module: nn.Module, _args: Any, name: str = name or type(model).__name__) -> None:
                open_.append(record_function(name))
                open_[-1].__enter__()

            def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
                open_.pop().__exit__(None, None, None)

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = run()
        loss.backward()
    for handle in handles:
        handle.remove()
    return {event.key: event.cpu_memory_usage for event in prof.key_averages() if event.key in layers}


def memory_of_torchinfo(
    module: Any, model: nn.Module, data: Any, layers: Sequence[str]
) -> dict[str, float | str | None]:
    summary = module.summary(model, input_data=data, verbose=0)
    name_of = {id(one): name or type(model).__name__ for name, one in model.named_modules()}
    found: Counter[str] = Counter()
    for info in summary.summary_list:
        name = name_of.get(info.layer_id) or name_of.get(id(info.module))
        if name is None or not info.is_leaf_layer or not info.num_params:
            continue
        for layer in layers:
            if layer == type(model).__name__ or name == layer or name.startswith(f"{layer}."):
                found[layer] += info.output_bytes
    return {layer: found[layer] for layer in layers}


def memory(report: measuring.Report, options: argparse.Namespace) -> list[str]:
    closer = []
    size = {"layers": options.layers, "hidden": options.hidden, "tokens": options.tokens}
    for name in ("llama: sdpa", "llama: eager", "gpt2: sdpa", "planted"):
        if name == "planted":
            model: nn.Module = KeepingModel(8 * 2**20)
            data: Any = torch.ones(4, 8, requires_grad=True)
            layers = ["KeepingModel", "layers.0", "layers.1"]

            def run(model: nn.Module = model, data: Any = data) -> torch.Tensor:
                return model(data).sum()
        else:
            case = models.build(name.split(": ")[0], attention=name.split(": ")[1], **size)
            model, data = case.model, dict(case.batch(0))
            layers = [type(model).__name__, f"{case.blocks}.0", f"{case.blocks}.{options.layers - 1}"]

            def run(case: models.Case = case) -> torch.Tensor:
                return case.loss(case.model, case.batch(0))

        said: dict[str, Said] = {
            WRAPPER: memory_of_ours(model, run, layers),
            f"{TORCH} key_averages": memory_of_torch(model, run, layers),
            TORCHINFO: from_peer(
                "torchinfo",
                lambda module, model=model, data=data, layers=layers: memory_of_torchinfo(  # type: ignore[misc]
                    module, model, data, layers
                ),
            ),
            DEEPSPEED: "no memory",
        }
        truth = memory_truth(model, run, layers)
        title = f"Kept for backward, MiB: {'8 MiB planted in layers.1' if name == 'planted' else name}"
        closer += compare(report, title, truth, said, show=lambda size: f"{size / 2**20:,.3f}")
    return closer


# --- device time of traces --------------------------------------------------------------------------

TOTAL, BUSY, LAUNCHED = "sum, ms", "union, ms", "of the sum, with its launch, ms"
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def device_truth(path: Path) -> dict[str, float]:
    """Sum and union of what ran on devices, and the sum of that whose launch is in the trace, in seconds."""
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    launches = {
        _correlation(event) for event in events if "runtime" in _category(event) or "driver" in _category(event)
    }
    spans: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    launched = 0
    for event in events:
        if _category(event) in _DEVICE:
            start, lasted = round(event["ts"] * 1000), round(event["dur"] * 1000)
            spans[event.get("args", {}).get("device", event.get("pid"))].append((start, start + lasted))
            launched += lasted if _correlation(event) in launches else 0
    total = sum(end - start for device in spans.values() for start, end in device)
    union = 0
    for device in spans.values():
        last = 0
        for start, end in sorted(device):
            union += max(0, end - max(start, last))
            last = max(last, end)
    return {TOTAL: total / 1e9, BUSY: union / 1e9, LAUNCHED: launched / 1e9}


def _category(event: Mapping[str, Any]) -> str:
    return str(event.get("cat", "")).lower()


def _correlation(event: Mapping[str, Any]) -> object:
    return (event.get("args") or {}).get("correlation")


def device_of_ours(result: pw.ProfileResult) -> dict[str, float | str | None]:
    without = sum(row.time_ns for row in result.unattributed if row.reason in (LAUNCHED_BEFORE, NO_LAUNCH))
    busy = result.time.busy_ns
    return {
        TOTAL: result.time.total_ns / 1e9,
        BUSY: "not known; a warning says why" if busy is None else busy / 1e9,
        LAUNCHED: (result.time.total_ns - without) / 1e9,
    }


def device_of_hta(module: Any, path: Path) -> dict[str, float | str | None]:
    analysis = module.TraceAnalysis(
        trace_files={0: str(path)}, trace_dir=str(path.parent), include_last_profiler_step=True
    )
    kinds, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, duration_ratio=1.0, num_kernels=10**6)
    return {TOTAL: float(kernels["sum (us)"].sum()) / 1e6, BUSY: float(kinds["sum"].sum()) / 1e6}


def device_of_tracelens(module: Any, path: Path) -> dict[str, float | str | None]:
    analyzer = module.TreePerfAnalyzer.from_file(str(path))
    timeline = analyzer.get_df_gpu_timeline()
    busy = float(timeline.loc[timeline["type"] == "busy_time", "time ms"].iloc[0]) / 1e3
    launchers = analyzer.get_df_kernel_launchers()
    return {BUSY: busy, LAUNCHED: float(launchers["total_direct_kernel_time"].sum()) / 1e6 if len(launchers) else 0.0}


def traces(report: measuring.Report, options: argparse.Namespace) -> list[str]:
    import shared_traces  # needs pytest

    paths = options.traces or sorted(shared_traces.TRACES.glob("*.json.gz"))
    if not paths:
        print("\nno recorded traces beside this checkout: device time is not compared")
        return []
    truth: dict[str, float] = {}
    said: dict[str, dict[str, float | str | None]] = {WRAPPER: {}, HTA: {}, TRACELENS: {}}
    without_layer = []
    for path in paths:
        true = device_truth(path)
        name = path.name.split(".json")[0].removesuffix(".pt.trace")
        if not true[TOTAL]:
            print(f"\n{path.name} has no device events: left out")
            continue
        result = pw.load(path)
        claims: dict[str, Said] = {
            WRAPPER: device_of_ours(result),
            HTA: from_peer("hta.trace_analysis", lambda module, path=path: device_of_hta(module, path)),  # type: ignore[misc]
            TRACELENS: from_peer("TraceLens", lambda module, path=path: device_of_tracelens(module, path)),  # type: ignore[misc]
        }
        for what, seconds in true.items():
            truth[f"{name}: {what}"] = seconds
            for tool, claim in claims.items():
                said[tool][f"{name}: {what}"] = said_of(claim, what)
        without_layer += [
            {
                "trace": name,
                "why": row.reason,
                "ms": f"{row.time_ns / 1e6:,.3f}",
                "events": f"{row.count:,}",
                "share": f"{100 * row.time_ns / result.time.total_ns:.1f} %",
            }
            for row in result.unattributed
        ]
    note = "Sum and union over kernels, copies and sets; of the sum, what was launched by a call that is in the trace."
    closer = compare(
        report,
        "Device time of traces",
        truth,
        said,
        show=lambda seconds: f"{seconds * 1e3:,.3f}",
        alike=1e-6,
        note=note,
    )
    if without_layer:
        report.table("Device time that has no layer, as load() says, and why", without_layer)
    return closer


SECTIONS: dict[str, Callable[[measuring.Report, argparse.Namespace], list[str]]] = {
    "flops": flops,
    "time": times,
    "memory": memory,
    "traces": traces,
}


def main(options: argparse.Namespace) -> None:
    report = measuring.Report("truth", PACKAGES)
    closer = []
    for name, section in SECTIONS.items():
        if options.only in (None, name):
            closer += section(report, options)
    print("\n## Where another is closer than ours\n")
    print("\n".join(f"- {line}" for line in closer) or "nowhere")
    report.content["closer_than_ours"] = closer
    report.end(options.json)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("traces", metavar="TRACE", type=Path, nargs="*")
    found.add_argument("--only", choices=tuple(SECTIONS))
    found.add_argument("--layers", type=int, default=4)
    found.add_argument("--hidden", type=int, default=256)
    found.add_argument("--tokens", type=int, default=128)
    found.add_argument("--wait", type=float, default=20.0, help="ms of a planted wait")
    found.add_argument("--json", type=Path, help="write the numbers here, too")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(parser().parse_args())
