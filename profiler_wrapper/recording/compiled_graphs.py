"""What run.json says of compiled code: per Inductor graph, by its cache key, which modules each kernel works for.

    {"kernels": [[name, is_extern, phase, [number of a module, ...]], ...],     in the order of the calls
     "inside": [[root, path, [full name of each module, by number]], ...]}      the layers that it may run in

A module without a kernel ran as well, but nothing of it is left.

or, instead of that, why a graph's kernels are not known.
"""

from __future__ import annotations

ALL_GRAPHS = "*"  # stands for the key of any graph that is not listed
