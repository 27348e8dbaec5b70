"""For scripts: their own with-block where the environment asks for it, else nothing."""

import os
from contextlib import nullcontext


def own_block(model=None):
    if "OWN_BLOCK" not in os.environ:
        return nullcontext()
    from profiler_wrapper import ProfilerWrapper

    return ProfilerWrapper(
        model, output_dir=os.environ["OWN_BLOCK"], files="result", run_name="own", enable_print_summary=False
    )
