"""Mutants that change nothing anybody can see, for `mutants.py`: (function, line of source, change) -> why."""

from __future__ import annotations

_ALWAYS_SET = "a default that every layer has replaced before anybody reads it"
_UNREAD = "filled before it is read"
_ONLY_SPEED = "the rest would give the same, only slower"
_NO_ZERO = "no profiler gives this number: they begin at 1"
_NEVER_ON_IT = "a threshold of time that no case sits on"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("Layer", "depth: int = 0", "0 -> 1"): _ALWAYS_SET,
    ("Layer", "depth: int = 0", "0 -> -1"): _ALWAYS_SET,
    ("Layer", "block: int = -1", "-1 -> 0"): _ALWAYS_SET,
    (
        "_Walk.__init__",
        "self.place_of = np.full(len(spans), -1, dtype=np.int32)  # of visited spans, until the walk ends",
        "-1 -> 0",
    ): _UNREAD,
    ("closure_ops", "if not len(made_nodes):", "early return dropped"): _ONLY_SPEED,
    (
        "_find_blocks",
        "candidates = repeated - {i for i in holds_repeated if i >= 0 and looks_like_stage(tree.layers[i].class_name)}",
        ">= -> >",
    ): "the first layer is a root, and no root is among the repeated",
    ("unseen_until_ns", "if start_ns[first] - free_ns > _LONGEST_WAY_NS:", "> -> >="): _NEVER_ON_IT,
    (
        "launches",
        "ops = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.external_id >= 0))",
        ">= -> >",
    ): _NO_ZERO,
    (
        "launches",
        "ops = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.external_id >= 0))",
        "0 -> 1",
    ): _NO_ZERO,
    (
        "_places_over_time.close_until",
        "while stack and stack[-1][0] <= limit:",
        "<= -> <",
    ): "what ends where another begins is closed with that one, and the last place of an instant counts",
    (
        "unseen_until_ns",
        "found = max(found or 0, int(start_ns[first]))",
        "0 -> -1",
    ): "a kernel begins after its launch, which begins after 0",
    (
        "launches",
        "runtime = np.flatnonzero((spans.category == Category.RUNTIME) & (spans.correlation >= 0))",
        ">= -> >",
    ): _NO_ZERO,
    (
        "launches",
        "runtime = np.flatnonzero((spans.category == Category.RUNTIME) & (spans.correlation >= 0))",
        "0 -> 1",
    ): _NO_ZERO,
    (
        "DeviceMemory.highest",
        "padded = np.append(self.held, self.held[-1])",
        "-1 -> 0",
    ): "what stands behind the last value belongs to no interval",
    (
        "EventsByAddress._at",
        "event_found = self._order[np.where(inside, place, 0)]",
        "0 -> -1",
    ): "any place does: what is not inside is left out below",
    (
        "find_changes",
        "least = max(1.0, _WORTH_IT * float(owned.timeline.total_bytes[peak]))",
        "1.0 -> 2.0",
    ): "no change saves a single byte",
}
