"""Which layers stand above and beside which, for the layer table of the page: parents, and like siblings as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.folding import Fold, Tree, layer_totals, odd_ones


def parents_of_layers(analysis: Analysis) -> dict[str, str]:
    """The layer with a row above each that has one."""
    return {total.layer: total.parent for total in layer_totals(analysis) if total.parent is not None}


def layer_groups(analysis: Analysis) -> list[dict[str, Any]]:
    """Siblings that the text table folds into one row, such as `layers.{0..31}`, with the odd ones named."""
    return [
        {
            "label": fold.label,
            "parent": parent,
            "layers": [member.layer for member in fold.members],
            "odd": [{"layer": one.layer.layer, "what": one.what, "excess": one.excess} for one in odd_ones(fold)],
        }
        for parent, fold in _all_folds(analysis)
        if fold.numbered
    ]


def _all_folds(analysis: Analysis) -> Iterator[tuple[str | None, Fold]]:
    """Each parent with each fold of its children, folds of other parents' children apart."""
    totals = layer_totals(analysis)
    tree = Tree(totals)
    yield from ((None, fold) for fold in tree.roots())
    for total in totals:
        alone = Fold(total.layer, (total,), (total.layer,), numbered=False)
        yield from ((total.layer, fold) for fold in tree.children(alone))
