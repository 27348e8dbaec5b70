"""What holds of any result, whatever was recorded: each law gives what breaks it, a line each; none: it holds.

    python tests/invariants.py trace.json.gz run_directory ...

prints what breaks them. `INVARIANTS` has all, by name; `broken(result)` asks them. `row_invariants.py` has those of
rows, `text_invariants.py` those of texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import checkout  # noqa: F401
import row_invariants
import text_invariants
from profiler_wrapper.tables.model import Analysis

Invariant = Callable[[Analysis], Iterable[str]]
INVARIANTS: dict[str, Invariant] = {
    law.__name__: law
    for law in (
        row_invariants.layers_make_the_total,
        row_invariants.reasons_make_the_unattributed,
        row_invariants.classes_make_the_total,
        row_invariants.steps_make_the_total,
        row_invariants.phases_are_the_same_in_all_tables,
        row_invariants.operators_make_the_total,
        row_invariants.kernels_make_the_total,
        row_invariants.events_are_counted_once,
        row_invariants.parts_make_their_step,
        row_invariants.collectives_make_the_communication,
        row_invariants.attention_is_that_of_its_layers,
        row_invariants.rows_are_one_tree,
        row_invariants.parents_hold_children,
        row_invariants.roots_hold_everything,
        row_invariants.what_is_unknown_below_is_unknown_above,
        row_invariants.no_part_is_more_than_its_whole,
        row_invariants.children_are_parts_of_parents,
        row_invariants.steps_of_a_row_are_its_time,
        row_invariants.flops_are_the_same_in_all_tables,
        row_invariants.utilization_is_flops_over_time,
        row_invariants.parts_of_the_wall_time_make_each_step,
        row_invariants.busy_and_idle_are_known_together,
        row_invariants.shares_are_from_0_to_1,
        row_invariants.no_peak_is_below_what_is_held,
        row_invariants.no_peak_is_below_one_inside,
        row_invariants.categories_make_what_is_allocated,
        row_invariants.what_is_kept_was_allocated,
        row_invariants.what_is_kept_for_backward_is_kept_inside,
        row_invariants.moments_are_in_their_steps,
        row_invariants.names_of_layers_are_rows,
        row_invariants.products_have_the_flops_of_their_sizes,
        row_invariants.experts_make_their_layer,
        row_invariants.what_makes_results_comparable_is_so,
        row_invariants.a_result_is_like_itself,
        row_invariants.no_row_is_twice_and_the_most_come_first,
        row_invariants.nothing_is_below_zero,
        row_invariants.what_is_not_known_has_a_reason,
        row_invariants.json_comes_back,
        row_invariants.csv_is_json,
        text_invariants.text_is_json,
        text_invariants.titles_say_the_total,
        text_invariants.every_share_says_of_what,
        text_invariants.numbers_of_findings_are_in_their_details,
        text_invariants.details_of_findings_are_those_of_the_tables,
        text_invariants.causes_of_idleness_are_the_idle_time,
        text_invariants.findings_are_whole,
        text_invariants.no_time_is_claimed_twice,
        text_invariants.the_verdict_says_its_findings,
        text_invariants.the_verdict_is_that_of_the_tables,
    )
}
OF_TIME = (  # which hold of the wildest trace too
    "layers_make_the_total",
    "reasons_make_the_unattributed",
    "classes_make_the_total",
    "steps_make_the_total",
    "events_are_counted_once",
    "parts_make_their_step",
    "collectives_make_the_communication",
    "parents_hold_children",
    "steps_of_a_row_are_its_time",
)
_MOST_LINES = 5  # of one law: what breaks it once often does in each row


def broken(result: Analysis, laws: Iterable[str] = INVARIANTS) -> list[str]:
    """What breaks these laws, each line with the law's name."""
    found = []
    for name in laws:
        lines = list(INVARIANTS[name](result))
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        found += [f"{name}: {line}" for line in (*lines[:_MOST_LINES], *more)]
    return found


def main(paths: Sequence[str]) -> int:
    """Print what breaks the laws in each trace or run directory; 1 where anything does."""
    import profiler_wrapper

    total = 0
    for path in paths:
        lines = broken(profiler_wrapper.load(path))
        total += len(lines)
        print(*(f"{path}: {line}" for line in lines or ["nothing"]), sep="\n")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
