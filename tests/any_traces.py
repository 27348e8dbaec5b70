"""Traces for laws: one training step by hand, and any that hypothesis thinks of."""

from __future__ import annotations

from hypothesis import strategies as st

from recordings import AUTOGRAD, Trace

PATHS = (".", "a", "a.b", "a.c", "d")
NAMES = ("aten::mm", "c10d::allreduce_", "CheckpointFunctionBackward", "aten::_flash_attention_forward", "x")
NODES = ("MmBackward0", "torch::autograd::AccumulateGrad", "torch::autograd::GraphRoot", "CheckpointFunctionBackward")
ANNOTATIONS = ("ProfilerStep#3", "Optimizer.step#SGD.step", "FSDP::all_gather (a.b)", "FSDP::post_backward", "block")


def training_step() -> Trace:
    """Two layers, one attention kernel each way, a collective beside compute, an optimizer kernel."""
    return (
        Trace()
        .annotation("ProfilerStep#4", 0, 1000)
        .mark(".", 0, 300)
        .mark("attn", 10, 100, kind="attention")
        .op("aten::_flash_attention_forward", 20, 60, sequence=1, forward_thread=0)
        .kernel("flash_fwd_kernel", 1000, 1400, launched=30)
        .mark("mlp", 110, 200)
        .op("aten::mm", 120, 150, sequence=2, forward_thread=0)
        .kernel("gemm", 1400, 1500, launched=130)
        .op("aten::add", 250, 260)
        .kernel("elementwise_kernel", 1500, 1510, launched=255)
        .node("MmBackward0", 400, 500, number=2)
        .kernel("gemm", 1600, 1800, launched=450, thread=AUTOGRAD)
        .kernel("ncclDevKernel_AllReduce", 1700, 2000, launched=460, thread=AUTOGRAD, stream=20)
        .node("FlashAttentionBackward0", 600, 700, number=1)
        .op("aten::_flash_attention_backward", 610, 690, thread=AUTOGRAD)
        .kernel("flash_bwd_kernel", 2100, 3100, launched=650, thread=AUTOGRAD)
        .annotation("Optimizer.step#AdamW.step", 800, 900)
        .kernel("multi_tensor_apply", 3100, 3150, launched=850)
        .kernel("copy_kernel", 3150, 3157, launched=1100)
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Nested marks with kernels launched inside and outside of them, on two streams of two devices."""
    trace, now = Trace(), 0
    for _ in range(draw(st.integers(0, 3))):
        trace.annotation(f"ProfilerStep#{now}", now, now + 90)
        for path in draw(st.permutations(PATHS)):
            trace.mark(path, now + 5, now + 15 + draw(st.integers(0, 10)))
            now += 30
    for i in range(draw(st.integers(1, 12))):
        start, stream = draw(st.integers(0, 400)), draw(st.integers(1, 2))
        name = draw(st.sampled_from(["gemm", "ncclDevKernel", "flash_fwd"]))
        launched = draw(st.none() | st.integers(0, 200))
        length = draw(st.integers(0, 60))
        trace.kernel(name, start, start + length, launched=launched, stream=stream, device=draw(st.integers(0, 1)))
        if draw(st.booleans()):
            trace.op("aten::mm", 7 * i, 7 * i + 3)
    return trace


@st.composite
def wild_traces(draw: st.DrawFn) -> Trace:
    """Anything at any time: crossing marks, nodes without forward, numbers used twice, arrows to nowhere."""
    trace, small = Trace(), st.integers(0, 60)
    for _ in range(draw(st.integers(1, 14))):
        start, length, thread = draw(small), draw(st.integers(0, 30)), draw(st.integers(1, 3))
        end, number = start + length, draw(st.integers(-1, 3))
        match draw(st.integers(0, 7)):
            case 0:
                trace.mark(draw(st.sampled_from(PATHS)), start, end, thread=thread)
            case 1:
                trace.op(draw(st.sampled_from(NAMES)), start, end, thread=thread, sequence=number, forward_thread=0)
            case 2:
                trace.node(
                    draw(st.sampled_from(NODES)), start, end, thread=thread, number=number, forward_thread=thread
                )
            case 3:
                trace.annotation(draw(st.sampled_from(ANNOTATIONS)), start, end, thread=thread)
            case 4:
                trace.module(f"Net_{draw(st.integers(0, 3))}", start, end, thread=thread)
            case 5:
                launched = draw(st.none() | small)
                trace.kernel("ncclKernel" if number else "k", start, end, launched=launched, thread=thread)
            case 6:
                trace.memory(start, draw(st.sampled_from([8, -8])), address=number, thread=thread)
            case _:
                trace.arrow(start, end, forward_thread=thread, backward_thread=draw(st.integers(1, 3)))
    return trace
