"""What the `cat` of an event means, in the spelling of every version of Kineto."""

from __future__ import annotations

from profiler_wrapper.recording.columns import Category

SKIPPED = -1
OURS = -2  # the lanes that we spliced in
UNKNOWN = 100  # a launch, if it has a correlation and lies on a CPU lane; else in no figure, which is said

OUR_CATEGORY = "profiler_wrapper"
MODULE_PREFIX = "nn.Module: "

_KNOWN = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "python_function": Category.MODULE,
    "runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "hpu_op": Category.KERNEL,
    "mtia_ccp_events": Category.KERNEL,  # Kineto's enum has it as CONCURRENT_KERNEL
    "memcpy": Category.MEMCPY,
    "gpu_memcpy": Category.MEMCPY,
    "memset": Category.MEMSET,
    "gpu_memset": Category.MEMSET,
    "overhead": SKIPPED,
    "trace": SKIPPED,
    "cuda_event": SKIPPED,
    "cuda_profiler_range": SKIPPED,  # around kernels, for counters
    "collective_comm": SKIPPED,
    "": SKIPPED,
    OUR_CATEGORY: OURS,
}


def category_code(cat: str) -> int:
    """The Category that `cat` stands for, or SKIPPED, OURS, UNKNOWN."""
    cat = cat.lower()
    if cat in _KNOWN:
        return _KNOWN[cat]
    if cat.endswith("_sync"):
        return Category.SYNC
    if cat.endswith(("_runtime", "_driver")):
        return Category.RUNTIME
    return UNKNOWN
