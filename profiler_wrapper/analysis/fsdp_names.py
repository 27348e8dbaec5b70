"""The layers that FSDP2's annotations name: `FSDP::all_gather (layers.0)`, `... prefetch for layers.1`."""

from __future__ import annotations

import re
from functools import cache

from profiler_wrapper.analysis.layer_tree import LayerTree

_MODULES = re.compile(r"\((?P<held>[^()]+)\)|prefetch for (?P<prefetched>.+)")
_BACKWARD = re.compile(r"FSDP::\w*(post_backward|pre_backward|backward_prefetch)")
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def is_backward(name: str) -> bool:
    """Whether an annotation of this name is backward by what it says."""
    return _BACKWARD.match(name) is not None


def modules_named(name: str) -> list[str]:
    """The modules an annotation names; none stands for the root."""
    match = _MODULES.search(name)
    return (match["held"] or match["prefetched"]).split(", ") if match else []


class LayersByModule:
    """Finds the layer of a module's name as FSDP knows it.

    What wrappers put before the name is not in a layer's, and a root's prefix is not in FSDP's.
    """

    def __init__(self, tree: LayerTree) -> None:
        self._layer_by_name = tree.by_name()
        self.find = cache(self._find)

    def _find(self, module: str) -> int:
        """The layer of `module`, or the nearest above it; -1 for none."""
        parts = [part for part in module.split(".") if part not in _WRAPPERS]
        for dropped in range(len(parts)):
            for kept in range(len(parts), dropped, -1):
                layer = self._layer_by_name.get(".".join(parts[dropped:kept]), -1)
                if layer >= 0:
                    return layer
        for kept in range(len(parts), 0, -1):
            ending = "." + ".".join(parts[:kept])
            below_root = [layer for full, layer in self._layer_by_name.items() if full.endswith(ending)]
            if len(below_root) == 1:
                return below_root[0]
        return -1
