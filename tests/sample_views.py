"""A result in which every view of the page has something to show: numbers made up, and easy to add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from profiler_wrapper.tables.call_rows import AdapterRow, ExpertLayerRow, ExpertRow
from profiler_wrapper.tables.memory.use import memory_summary
from profiler_wrapper.tables.model import (
    AllocationRow,
    Analysis,
    AttentionCallRow,
    CollectiveRow,
    FlopRow,
    KernelRow,
    OperatorRow,
    OpMemoryRow,
    Overview,
    ProductRow,
    StepSplit,
    SynchronisationRow,
    Utilization,
)
from profiler_wrapper.tables.work.peaks import Peaks
from sample_memory import MIB, leaking_memory, llama_memory
from sample_results import llama

US = 1000
SDPA = "aten::_scaled_dot_product_flash_attention"


def full_analysis(blocks: int = 4, *, steps: int = 3, odd: int | None = 2, leak: bool = False, **more: Any) -> Analysis:
    """A Llama on one of eight H200s, with rows of everything; block `odd` takes twice the time of the others."""
    analysis = llama(blocks, steps=steps, odd=odd, unattributed_us={"no launch found": 40.0})
    use = leaking_memory(blocks) if leak else llama_memory(blocks)
    exposed_ns = sum(row.exposed_ns or 0 for row in collectives(steps))
    values: dict[str, Any] = {
        "time": replace(analysis.time, exposed_communication_ns=exposed_ns),
        "run": {**analysis.run, "rank": 0, "world_size": 8},
        "layers": tuple(_with_work(row) for row in analysis.layers),
        "flops": (
            FlopRow(layer="", phase="forward", class_name="gemm", dtype="bfloat16", flops_per_step=3 * 10**12,
                    causal_flops_per_step=2 * 10**12),
        ),
        "utilization": utilization(),
        "overview": overview(steps),
        "operators": operators(steps),
        "kernels": kernels(steps),
        "collectives": collectives(steps),
        "synchronisations": synchronisations(steps),
        "products": products(),
        "attention_calls": attention_calls(blocks),
        "experts": experts(),
        "expert_layers": expert_layers(),
        "adapters": adapters(),
        "allocations": allocations(),
        "op_memory": op_memory(),
        "memory": memory_summary(use),
        "memory_use": use,
        "summary": summary(),
        "warnings": ("memory of CPUs is not known",),
    }  # fmt: skip
    return replace(analysis, **(values | more))


def summary() -> dict[str, Any]:
    """One finding, about block 2, and what it leads to."""
    finding = {
        "id": "odd-block",
        "title": "model.layers.2 takes 2.0 times the median of its likes",
        "layer": "model.layers.2",
        "phase": "forward",
        "share": 0.2,
        "saves_at_most_us": 313.0,
        "saves_at_most_bytes": None,
        "evidence": ["626 µs a step, median of the others 313 µs"],
        "confidence": "high",
        "fix": "look at what model.layers.2 does that the others do not",
        "source": "model.py:12",
        "layers": ["model.layers.2"],
        "details": {},
    }
    return {
        "verdict": "One block takes twice the time of its likes: look there first.",
        "findings": [finding],
        "comparable": {},
    }


def _with_work(row: Any) -> Any:
    """At half of its roof: 300 TFLOP/s for MLPs, 100 for attention, 2 for the rest; 0.5 TB/s."""
    if not row.layer:
        return row
    spent, own = row.time_ns // 3, row.self_time_ns // 3
    rate = {"mlp": 300_000, "attention": 100_000}.get(row.kind, 2000)  # FLOPs a nanosecond
    return replace(
        row,
        flops_per_step=rate * spent,
        self_flops_per_step=rate * own,
        causal_flops_per_step=rate * spent,
        self_causal_flops_per_step=rate * own,
        bytes_moved_per_step=500 * spent,
        self_bytes_moved_per_step=500 * own,
        roof_time_per_step_ns=spent // 2,
        self_roof_time_per_step_ns=own // 2,
        memory_roof_time_per_step_ns=spent // 2,
        self_memory_roof_time_per_step_ns=own // 2,
    )


def utilization() -> Utilization:
    """MFU of 30 % of an H200."""
    return Utilization(
        step_time_ns=10_000 * US,
        model_flops_per_step=3 * 10**12,
        hardware_flops_per_step=3 * 10**12,
        causal_model_flops_per_step=2 * 10**12,
        causal_hardware_flops_per_step=2 * 10**12,
        mfu=0.30,
        hfu=0.30,
        causal_mfu=0.20,
        causal_hfu=0.20,
        peaks=Peaks(
            device="NVIDIA H200",
            flops_per_s={"bfloat16": 989e12, "float32": 67e12},
            bandwidth_bytes_per_s=4.8e12,
            source="a datasheet",
        ),
    )


def overview(steps: int) -> Overview:
    """Steps of 10 ms each."""
    split = StepSplit(
        step=2, span_ns=10_000 * US, kernel_ns=6000 * US, memcpy_ns=500 * US, memset_ns=100 * US,
        communication_ns=1400 * US, runtime_ns=700 * US, dataloader_ns=300 * US, cpu_ns=800 * US, other_ns=200 * US,
    )  # fmt: skip
    return Overview(
        device="NVIDIA H200",
        device_memory_bytes=141 << 30,
        compute_capability="9.0",
        multiprocessors=132,
        steps=tuple(replace(split, step=2 + i) for i in range(steps)),
        utilization=0.74,
        sm_efficiency=0.61,
        occupancy=0.42,
        tensor_core_share=0.55,
        kernels=900 * steps,
        launches_per_s=90_000.0,
        gaps_ns=2000 * US * steps,
    )


def operators(steps: int) -> tuple[OperatorRow, ...]:
    """`aten::mm` in two phases, attention, an elementwise op that tells no tensor cores, and one without a device."""
    return (
        OperatorRow(
            op="aten::mm", class_name="gemm", phase="backward", calls=56 * steps, self_time_ns=1500 * US * steps,
            time_ns=1500 * US * steps, self_cpu_time_ns=900 * US * steps, cpu_time_ns=950 * US * steps,
            device_events=56 * steps, tensor_core_eligible=True, tensor_core_time_ns=1200 * US * steps,
            layers=("model.layers.0.mlp", "lm_head"), shapes=("[512, 2048] x [2048, 8192]",),
        ),
        OperatorRow(
            op="aten::mm", class_name="gemm", phase="forward", calls=28 * steps, self_time_ns=800 * US * steps,
            time_ns=800 * US * steps, self_cpu_time_ns=400 * US * steps, cpu_time_ns=420 * US * steps,
            device_events=28 * steps, tensor_core_eligible=True, tensor_core_time_ns=800 * US * steps,
            layers=("model.layers.1.mlp",), sources=("train.py:42",),
        ),
        OperatorRow(
            op=SDPA, class_name="attention", phase="forward", calls=4 * steps, self_time_ns=800 * US * steps,
            time_ns=900 * US * steps, self_cpu_time_ns=60 * US * steps, cpu_time_ns=100 * US * steps,
            device_events=4 * steps, tensor_core_eligible=True, tensor_core_time_ns=None,
            layers=("model.layers.0.self_attn",),
        ),
        OperatorRow(
            op="aten::mul", class_name="elementwise", phase="forward", calls=90 * steps, self_time_ns=300 * US * steps,
            time_ns=300 * US * steps, self_cpu_time_ns=700 * US * steps, cpu_time_ns=700 * US * steps,
            device_events=90 * steps, tensor_core_eligible=False, tensor_core_time_ns=None, layers=("",),
        ),
        OperatorRow(
            op="aten::view", class_name="other", phase="forward", calls=200 * steps, self_time_ns=0, time_ns=0,
            self_cpu_time_ns=150 * US * steps, cpu_time_ns=150 * US * steps, device_events=0,
            tensor_core_eligible=False, tensor_core_time_ns=None, layers=(),
        ),
    )  # fmt: skip


def kernels(steps: int) -> tuple[KernelRow, ...]:
    """A matrix product with two launch configurations, attention, one that tells little, and a copy."""
    product: dict[str, Any] = {"name": "sm90_xmma_gemm_bf16", "class_name": "gemm", "tensor_cores": True}
    return (
        KernelRow(
            **product, count=60 * steps, time_ns=1500 * US * steps, min_ns=20 * US, max_ns=40 * US, grid=(16, 8, 1),
            block=(384, 1, 1), registers_per_thread=168, shared_memory_bytes=213_000, blocks_per_sm=0.97,
            occupancy=0.19, ops=("aten::mm",), layers=("model.layers.0.mlp", "lm_head"),
        ),
        KernelRow(
            **product, count=20 * steps, time_ns=500 * US * steps, min_ns=20 * US, max_ns=30 * US, grid=(4, 4, 1),
            block=(384, 1, 1), registers_per_thread=168, shared_memory_bytes=213_000, blocks_per_sm=0.12,
            occupancy=0.19, ops=("aten::mm",), layers=("model.layers.1.mlp",),
        ),
        KernelRow(
            name="flash_fwd_kernel", class_name="attention", tensor_cores=True, count=4 * steps,
            time_ns=800 * US * steps, min_ns=190 * US, max_ns=210 * US, ops=(SDPA,),
            layers=("model.layers.0.self_attn",),
        ),
        KernelRow(
            name="void at::native::elementwise_kernel<128, 4>", class_name="elementwise", tensor_cores=False,
            count=90 * steps, time_ns=300 * US * steps, min_ns=2 * US, max_ns=9 * US, grid=(1024, 1, 1),
            block=(128, 1, 1), registers_per_thread=32, shared_memory_bytes=0, blocks_per_sm=31.0, occupancy=0.88,
        ),
        KernelRow(
            name="mystery", class_name="other", tensor_cores=None, count=steps, time_ns=100 * US * steps,
            min_ns=100 * US, max_ns=100 * US,
        ),
        KernelRow(
            name="Memcpy HtoD (Pageable -> Device)", class_name="copy", count=2 * steps, time_ns=500 * US * steps,
            min_ns=200 * US, max_ns=300 * US, copied_bytes=8 * MIB * steps,
        ),
    )  # fmt: skip


def collectives(steps: int) -> tuple[CollectiveRow, ...]:
    """Gradients reduced behind the backward, and a gather that is waited for."""
    return (
        CollectiveRow(
            collective="all_reduce", group="dp", group_size=8, dtype="bfloat16", layer="", phase="backward",
            count=10 * steps, payload_bytes=400 * MIB * steps, time_ns=1000 * US * steps, exposed_ns=200 * US * steps,
            overlapped_ns=800 * US * steps, bandwidth_bytes_per_s=419.4e9, bus_bandwidth_bytes_per_s=734.0e9,
        ),
        CollectiveRow(
            collective="all_gather", group="tp", group_size=4, dtype="", layer="model.layers.0", phase="forward",
            count=2 * steps, payload_bytes=None, time_ns=400 * US * steps, exposed_ns=400 * US * steps,
            overlapped_ns=0, bandwidth_bytes_per_s=None, bus_bandwidth_bytes_per_s=None,
        ),
    )  # fmt: skip


def synchronisations(steps: int) -> tuple[SynchronisationRow, ...]:
    """A loss that is printed, and a copy."""
    return (
        SynchronisationRow(
            kind="item", op="aten::_local_scalar_dense", layer="", phase="other", count=steps,
            wait_ns=3000 * US * steps, sources=("train.py:57",),
        ),
        SynchronisationRow(
            kind="blocking copy", op="aten::copy_", layer="model.layers.2.mlp", phase="forward", count=2 * steps,
            wait_ns=120 * US * steps,
        ),
        SynchronisationRow(kind="stream", op="cudaStreamSynchronize", layer=None, phase="forward", count=steps,
                           wait_ns=10 * US * steps),
    )  # fmt: skip


def products() -> tuple[ProductRow, ...]:
    """One that is aligned, one with an odd vocabulary."""
    return (
        ProductRow(op="aten::mm", layer="model.layers.0.mlp", phase="forward", dtype="bfloat16", m=512, n=8192, k=2048,
                   batch=1, calls_per_step=2.0, time_per_step_ns=180 * US),
        ProductRow(op="aten::mm", layer="lm_head", phase="forward", dtype="bfloat16", m=512, n=50257, k=2048, batch=1,
                   calls_per_step=1.0, time_per_step_ns=600 * US),
    )  # fmt: skip


def attention_calls(blocks: int) -> tuple[AttentionCallRow, ...]:
    """Causal flash attention with fewer heads of keys, a call in each block."""
    return tuple(
        AttentionCallRow(
            layer=f"model.layers.{i}.self_attn", phase="forward", backend="flash", dtype="bfloat16",
            query_shape=(1, 32, 512, 64), key_shape=(1, 8, 512, 64), mask=False, causal=True, dropout=None,
            grouped=True, calls_per_step=1.0, time_per_step_ns=200 * US,
        )
        for i in range(blocks)
    )  # fmt: skip


def experts() -> tuple[ExpertRow, ...]:
    """Two in a loop, the first with three times the tokens."""
    return tuple(
        ExpertRow(
            layer="model.layers.0.mlp.experts", expert=expert, tokens_per_step=tokens, share=tokens / 512,
            time_per_step_ns=round(tokens) * US, flops_per_step=round(tokens) * 10**6,
            step_tokens=(round(tokens),) * 2, step_times_ns=(round(tokens) * US,) * 2,
        )
        for expert, tokens in enumerate((384.0, 128.0))
    )  # fmt: skip


def expert_layers() -> tuple[ExpertLayerRow, ...]:
    """A loop whose tokens are known, and a fused kernel whose are not."""
    return (
        ExpertLayerRow(layer="model.layers.0.mlp.experts", router="model.layers.0.mlp.gate", method="loop", kernels=(),
                       experts=2, tokens_per_step=512.0, balance=1.5, step_balance=(1.5, 1.5), router_time_ns=20 * US,
                       experts_time_ns=512 * US, shared_time_ns=90 * US, all_to_all_time_ns=40 * US,
                       tokens_unknown=None),
        ExpertLayerRow(layer=None, router=None, method="fused_moe", kernels=("fused_moe_kernel",), experts=None,
                       tokens_per_step=None, balance=None, step_balance=(), router_time_ns=None,
                       experts_time_ns=300 * US, shared_time_ns=None, all_to_all_time_ns=0,
                       tokens_unknown="one kernel works for all"),
    )  # fmt: skip


def adapters() -> tuple[AdapterRow, ...]:
    """LoRA beside one projection."""
    return (
        AdapterRow(layer="model.layers.0.self_attn.q_proj", adapters=("q_proj.lora_A.default",),
                   base_time_ns=100 * US, adapter_time_ns=60 * US, base_flops_per_step=10**9,
                   adapter_flops_per_step=10**7),
    )  # fmt: skip


def allocations() -> tuple[AllocationRow, ...]:
    """One that stays, one that goes."""
    return (
        AllocationRow(size_bytes=64 * MIB, allocated_ns=2_000_000, released_ns=None, layer="lm_head", op="aten::mm",
                      phase="forward", category="activation"),
        AllocationRow(size_bytes=16 * MIB, allocated_ns=2_500_000, released_ns=3_750_000, layer="",
                      op="aten::_foreach_sqrt", phase="optimizer", category="workspace"),
    )  # fmt: skip


def op_memory() -> tuple[OpMemoryRow, ...]:
    """Of two ops and of what lies outside of all."""
    return (
        OpMemoryRow(op="aten::mm", allocations=90, allocated_bytes=900 * MIB, kept_bytes=800 * MIB,
                    largest_bytes=64 * MIB),
        OpMemoryRow(op="aten::_foreach_sqrt", allocations=12, allocated_bytes=100 * MIB, kept_bytes=0,
                    largest_bytes=16 * MIB),
        OpMemoryRow(op="", allocations=1, allocated_bytes=3 * MIB, kept_bytes=None, largest_bytes=3 * MIB),
    )  # fmt: skip
