"""What the keys of `result.json` mean where no comment beside the field of a row says it."""

from __future__ import annotations

from profiler_wrapper.analysis.model import CATEGORIES

# What a field means where its row does not say, by its name in the row.
WORDS = {
    "allocations": "How many allocations",
    "attention_flops": "FLOPs of attention",
    "attention_ns": "The part of the time that is attention",
    "attributed_ns": "Time whose layer is known, or that by nature has none",
    "backend": "Implementation of attention: flash, cudnn, mem_efficient, flex, math, external",
    "bandwidth_bytes_per_s": "Of its memory; null where not known",
    "batch": "Products of this size in one call",
    "blocks_per_sm": "Of the launch, over all multiprocessors",
    "bytes_moved_per_step": "Each input of an op read once, each output written once",
    "bytes_per_step": "What is added every step",
    "calls": "How often it was called, in all timed steps",
    "calls_per_step": "Calls, a step",
    "category": f"What the bytes are for: {', '.join(CATEGORIES)}",
    "causal": "Whether attention was causal; null where the trace does not tell",
    "causal_flops_per_step": "FLOPs without what a causal mask hides",
    "causal_hardware_flops_per_step": "Of a step, all that ran, without what a causal mask hides",
    "causal_hfu": "As hfu, without what a causal mask hides",
    "causal_mfu": "As mfu, without what a causal mask hides",
    "causal_model_flops_per_step": "Of a step's forward and backward, without what a causal mask hides",
    "causal_repeated_flops_per_step": "As repeated_flops_per_step, without what a causal mask hides",
    "class_name": "Class: of a layer, its Python class; of events gemm, attention, norm, softmax, elementwise, ...",
    "communication_ns": "Of it, collectives",
    "confidence": "How sure this is",
    "count": "How many events",
    "count_per_step": "How many are added every step",
    "cpu_ns": "The CPU in ops, with no device at work",
    "cpu_time_ns": "Time of the CPU in it, with what it calls",
    "dataloader_ns": "Loading data",
    "device": "Name of the device; null without one",
    "device_memory_bytes": "Memory of the device",
    "dropout": "Probability; null where the trace does not tell",
    "dtype": "Type of number by torch's name (bfloat16); empty where the trace does not tell",
    "entry_reserved_bytes": "Reserved when the layer is entered: mean over calls",
    "exposed_communication_ns": "Communication with no compute beside it; null without device events",
    "flops_per_s": "Dense, by type of number",
    "flops_per_step": "FLOPs of matrix products, convolutions and attention",
    "group_size": "Ranks in the group; null where the trace does not tell",
    "hardware_flops_per_step": "Of a step, all that ran",
    "hfu": "Share of the peak of what ran, 0 to 1",
    "id": "Of the rule",
    "idle_ns": "The device with nothing to do while the CPU was here; null where not known",
    "k": "Inner size of the product",
    "kernel_ns": "A kernel running",
    "key_shape": "Shape of the keys: batch, heads, tokens, head_dim",
    "kind": "What it is: of a layer block, attention, mlp, norm, ...; of a change what to do",
    "largest_bytes": "The largest one",
    "launches_per_s": "Launches within the steps, a second",
    "known_flops_per_step": "At least so many of flops_per_step: without ops that no formula is for",
    "layer": 'Full name in the plain model; "" for what by nature has no module; null where not known',
    "layers": "All layers that it is about",
    "m": "Rows of the result",
    "mask_shape": "Shape of the mask; empty where none was given",
    "max_ns": "The longest one",
    "memcpy_ns": "A copy running, and no kernel or communication",
    "memset_ns": "A set running, and no kernel, communication or copy",
    "mfu": "Share of the peak that goes into the model, 0 to 1; null where not known",
    "min_ns": "The shortest one",
    "model_flops_per_step": "Of a step's forward and backward, without what was computed before",
    "multiprocessors": "Of the device",
    "n": "Columns of the result",
    "name": "Name as the trace has it",
    "occupancy": "Estimated, 0 to 1",
    "op": "Name of the op (aten::mm)",
    "other_ns": "Nothing of the others",
    "phase": "What the loop was doing",
    "query_shape": "Shape of the queries: batch, heads, tokens, head_dim",
    "reason": "Why the layer is not known",
    "registers_per_thread": "Of the launch",
    "reserved_bytes": "Reserved by the allocator: mean over calls; null on a CPU",
    "roof_time_per_step_ns": "At the roof: per op the longer of its bytes and its FLOPs",
    "runtime_ns": "The CPU in calls into the runtime or driver, with no device at work",
    "saves_bytes": "At the peak",
    "self_bytes_moved_per_step": "As bytes_moved_per_step, of its own ops only",
    "self_causal_flops_per_step": "As causal_flops_per_step, of its own ops only",
    "self_cpu_time_ns": "Time of the CPU in it, without what it calls",
    "self_flops_per_step": "FLOPs of its own ops only, without the layers below: these add up",
    "self_memory_roof_time_per_step_ns": "As memory_roof_time_per_step_us, of its own ops only",
    "self_retained_bytes": "As retained_bytes, without what the layers below retain",
    "self_roof_time_per_step_ns": "As roof_time_per_step_us, of its own ops only",
    "self_time_ns": "Time in it, but in no layer below: these add up to the total, with what is unattributed",
    "shared_memory_bytes": "Of the launch, a block",
    "size_bytes": "Size",
    "source": "Where this is known from",
    "span_ns": "Wall time",
    "step": "Number of the step; null for what belongs to no step",
    "steps": "One entry a step",
    "time_ns": "Time, with all that is inside",
    "time_per_step_ns": "Time, a step, in the steps with shapes",
    "total_ns": "Time of all events of the trace: device time, or wall time of ops where there is no device",
    "unattributed_ns": "Time that should have a layer, of which none is known",
    "value_shape": "Shape of the values: batch, heads, tokens, head_dim",
    "wait_ns": "Wall time in the call that waits",
}
# The same, of one row: where the name alone means something else there.
WORDS_OF_ROW = {
    "LayerRow.self_time_ns": (
        "Time in the layer and in no layer below it. Each kernel, copy and set belongs to the innermost layer "
        "whose op launched it. The self times of all rows and the unattributed time add up to the total exactly"
    ),
    "LayerRow.time_ns": (
        "Device time of the layer and of all layers below it; wall time of ops on a trace without device events. "
        "Kernels that overlap on two streams count twice"
    ),
    "LayerRow.fused_ns": (
        "Compiled code only: kernels that work for this layer and for others. They are in the time of the layer "
        "that holds all of these, and not in this row's"
    ),
    "LayerRow.cpu_time_ns": "Wall time of its ops: per thread their union, summed over threads",
    "LayerRow.attention_ns": (
        "Part of the time that is attention, by the op that launched the kernel or by the kernel's name. Attention "
        "made of single ops counts as far as its ops are recognised"
    ),
    "LayerRow.communication_ns": (
        "Part of the time that is collectives, by the names of kernels and ops. It includes waiting for slower ranks"
    ),
    "LayerRow.exposed_communication_ns": (
        "Communication during which no compute kernel ran; null without device events"
    ),
    "LayerRow.idle_ns": "The device had nothing to run while the CPU was in the layer; null without device events",
    "LayerRow.flops_per_step": (
        "FLOPs of matrix products, convolutions and attention, two per multiply-add, from the shapes of the ops "
        "that ran in the steps with shapes; null where an op of the layer has no formula"
    ),
    "LayerRow.self_flops_per_step": "FLOPs of its own ops only, without the layers below: these add up",
    "LayerRow.causal_flops_per_step": "FLOPs without what a causal mask hides; tables leave it out where it is equal",
    "LayerRow.bytes_moved_per_step": (
        "Each input of an op read once, each output written once, from shapes, types and strides. A lower bound: a "
        "kernel whose caches are too small reads more"
    ),
    "LayerRow.roof_time_per_step_ns": (
        "Time at the roof: of each op the longer of its FLOPs at the peak and its bytes at the memory's bandwidth, "
        "summed. FLOPs that a causal mask hides are left out; null without a known peak and bandwidth"
    ),
    "LayerRow.calls": "Entries of the module; null in phases in which it is not entered (backward, optimizer)",
    "LayerRow.entry_allocated_bytes": "Allocated when the layer is entered, mean over calls",
    "LayerRow.allocated_bytes": "Allocated when the layer returns, mean over calls",
    "LayerRow.reserved_bytes": (
        "Reserved by the caching allocator when the layer returns, mean over calls; null on a CPU"
    ),
    "LayerRow.retained_bytes": (
        "Allocated in the forward of the layer and alive when the backward of that forward begins; without a "
        "backward, alive when the outermost forward ends. Mean over calls"
    ),
    "LayerRow.self_retained_bytes": "What it retains itself, without what the layers below retain: these add up",
    "LayerRow.peak_bytes": (
        "Highest allocated on the device while inside, over all calls. On a CPU what was there before counts only "
        "as far as model and optimizers held it"
    ),
    "AttentionRow.time_ns": "Time of them all",
    "Change.layers": "Layers that it is about",
    "ClassRow.time_ns": "Time of them all",
    "CollectiveRow.time_ns": "Time of them all",
    "KernelRow.time_ns": "Time of them all",
    "LayerRow.class_name": "Its Python class",
    "Slope.steps": "Over which this was seen",
    "StepRow.span_ns": "The span of the CPU alone, from its begin to its end there: the CPU runs ahead of a busy "
    "device. What a step takes is span_us of overview.steps",
    "StepSplit.communication_ns": "A collective running, and neither kernel, copy nor set",
    "SynchronisationRow.kind": "What makes it wait",
    "TimeTotals.span_ns": "Wall time of the whole trace",
    "UnattributedRow.time_ns": "Time of them all",
}
# Rows whose times and counts are sums over the timed trace, and what is then said of each such key.
SUMMED_ROWS = (
    "AdapterRow",
    "AttentionRow",
    "ClassRow",
    "CollectiveRow",
    "ExpertLayerRow",
    "KernelRow",
    "LayerRow",
    "OperatorRow",
    "SynchronisationRow",
    "TimeTotals",
    "UnattributedRow",
)
SUMMED_COUNTS = ("calls", "count", "device_events", "self_events")
NOT_SUMMED = ("max_ns", "min_ns", "span_ns")  # nor is what holds several values, such as one of each step
SUMMED = "; summed over the timed steps: divide by len(run.timed_steps) for one step"
TOP = {
    "schema_version": "Version of this contract; later ones add keys and never change one",
    "summary": "What to know first: the verdict, what to do about it, and what makes two results comparable",
    "time_basis": "What times are: of device events, or of ops on the CPU where the trace has none",
    "complete": "False where the recording was cut short, or something could not be recorded",
    "warnings": "What is not known or was odd, and why",
    "run": "Where this was recorded, and what",
    "time": "Times of the whole timed trace",
    "unattributed": "Time that should have a layer, of which none is known, by reason",
    "layers": "One row per layer and phase. The self times and the unattributed ones add up to the total",
    "attention": "Attention, by layer, phase and backend",
    "classes": "Time by class of event and phase",
    "steps": "One row per step, and one with step null for the rest; their times add up to the total",
    "parts": "Parts of each step: prefill, tokens, models of a pipeline, roles of training; they add up to its time",
    "flops": "All FLOPs, by layer, phase, class and type of number",
    "uncounted": "Ops that have FLOPs, and nothing tells how many",
    "untold_bytes": "Ops that move bytes, and nothing tells how many",
    "operators": "One row per op and phase",
    "kernels": "One row per kernel and launch configuration",
    "collectives": "One row per kind of collective, process group, layer and phase",
    "synchronisations": "Waits of the CPU for the device",
    "products": "Matrix products and convolutions by their sizes, of the steps with shapes",
    "attention_calls": "Calls of attention by their sizes, of the steps with shapes",
    "experts": "Tokens, time and FLOPs of each expert, of the steps with shapes",
    "expert_layers": "What computes the experts of each layer, how even their tokens are, what runs beside them",
    "adapters": "LoRA and other adapters beside what they adapt",
    "allocations": "The largest allocations",
    "op_memory": "What each op allocated",
    "series": "What is followed by name, per step or entry: microseconds; of a function what it gave",
    "utilization": "How much of the machine a step uses; null where the FLOPs of a step are not known",
    "overview": "How busy the machine is within the steps",
    "memory": "What was allocated, by whom and why; all null where no allocation was recorded",
}  # fmt: skip
