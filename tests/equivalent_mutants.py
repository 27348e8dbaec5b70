"""Mutants that change nothing anybody can see, for `mutants.py`: (function, line of source, change) -> why."""

from __future__ import annotations

_ALWAYS_SET = "a default that every layer has replaced before anybody reads it"
_UNREAD = "filled before it is read"
_ONLY_SPEED = "the rest would give the same, only slower"
_NOT_LEFT = "a default that its one maker leaves to nobody"
_MOVED = "a name of a file that is moved before anybody sees it"
_NO_ZERO = "no profiler gives this number: they begin at 1"

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
        "unseen_until_ns",
        "found = max(found or 0, int(start_ns[first]))",
        "0 -> -1",
    ): "a kernel begins after its launch, which begins after 0",
    (
        "",
        '_FIRST_MEMORY_EFFICIENT = {"f32": 80, "float": 80, "bf16": 75, "cutlass::bfloat16_t": 75}'
        "  # architecture; else 70",
        "75 -> 74",
    ): "these kernels are made for 50, 70, 75 and 80, and for none between",
    (
        "uses_tensor_cores",
        "if is_communication(kernel):",
        "early return dropped",
    ): "a kernel that communicates has no word of a product in its name, and its class says the same further down",
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
        "find_changes",
        "least = max(1.0, _WORTH_IT * float(owned.timeline.total_bytes[peak]))",
        "1.0 -> 2.0",
    ): "no change saves a single byte",
    (
        "Steps.place_of",
        "return np.where((place >= 0) & (time_ns < self.end_ns[place]), place, -1)",
        "0 -> -1",
    ): "a place of -1, before all steps, is what stands for none",
    (
        "_Walk.__init__",
        "self.role = roles[spans.name] if len(spans) else np.empty(0, dtype=np.int8)",
        "0 -> 1",
    ): "a recording without events is refused before it gets here",
    (
        "_Walk._recomputing_nodes",
        "numbered = is_op & (spans.sequence >= 0)",
        "0 -> -1",
    ): "who asks whether a node recomputes has an op with a number inside of it at hand",
    (
        "EventsByAddress.__init__",
        "self._stride = len(address) + 1",
        "1 -> 0",
    ): "an event behind all of an address then has the key of the next address's first, and the one before it is asked",
    (
        "_no_longer_listed_ns",
        "lists = (address[block] == known.address) & (index.last_before(known.address, seen) < 0)",
        "< -> <=",
    ): "where the very first event is at the address of a block, that one has gone with it, whatever is listed later",
    (
        "_Rules.phase_is",
        "return at(self.attribution.in_phases(*phases), self.blocks.place, False)",
        "False -> True",
    ): "what was there before has the category that is listed, whatever the rules say of it",
    (
        "_Rules.__init__",
        "self.made_ns, self.freed_ns = at(memory.time_ns, blocks.made, 0), "
        "np.append(memory.time_ns, NEVER)[blocks.freed]",
        "0 -> -1",
    ): "what was there before has the category that is listed, whatever the rules say of it",
    (
        "_class_of_kernel",
        "if classes.is_communication(name):",
        "early return dropped",
    ): "what communicates is no attention, and its class is none of a product",
    (
        "_elementwise.element",
        "numbers = [x.text(place) for place in range(min(count, x.count)) if place not in inputs]",
        "min -> max",
    ): "an input beyond those that the op declares is its output, and has no text",
    (
        "share_of_peak",
        "at_peak_s += number / peak if peak else 0.0",
        "0.0 -> 0.0",
    ): "twice zero is zero",
    (
        "",
        "lambda x: x.product().elements * x.size(0)),",
        "0 -> -1",
    ): "the last input of such a product, its scales, has the type of the first",
    (
        "Baseline.renamed_like",
        'names = shown_names(self.results[0], other.results[0], "run")',
        "0 -> -1",
    ): "the runs of one side have the same layers",
    (
        "_is_worse",
        'one, other = (max(SLOWER_BACKENDS.get(name, 0) for name in side.split(" + ")) for side in (before, after))',
        "0 -> -1",
    ): "all slow backends have a number above both",
    (
        "_totals",
        "if same_basis and all(len(one) >= FEWEST_STEPS and (one > 0).all() for one in times):",
        "0 -> 1",
    ): "no step takes one nanosecond",
    (
        "_within_rank",
        "same = [first + index for index in computes if operations[index].role.direction == direction]",
        "== -> !=",
    ): "there are two directions, and each has its turn",
    (
        "_columns",
        'largest = max((row["peak_bytes"] or 0 for row in rows), default=0)',
        "0 -> 1",
    ): "one byte is no GiB either",
    (
        "_outlier_layers",
        "stage=int(ideal.own.stages[0]),",
        "0 -> -1",
    ): "all ranks have one stage there",
    ("LayerWatch.close", "self._closed = True", "True -> False"): "each of its users closes it once",
    (
        "Breakdown._enter",
        "return False",
        "False -> True",
    ): "the step's parts are given up: leaving one does nothing",
    (
        "SpanLog.look",
        "if first or (not self.owner.known and has_process_group()):  # type: ignore[union-attr]",
        "and -> or",
    ): _ONLY_SPEED,
    (
        "SpanLog.look",
        "self.look_at = now + (_KNOWN_LOOK_NS if self.owner is not None and self.owner.known else _LOOK_NS)",
        "+ -> -",
    ): _ONLY_SPEED,
    ("SpanLog.look", "if first:", "early return dropped"): _ONLY_SPEED,
    ("SeenStep", "stages: int = 1", "1 -> 2"): _NOT_LEFT,
    (
        "_names_above",
        'return (".".join(parts[:count]) for count in range(1, len(parts)))',
        "1 -> 0",
    ): "no layer that is timed is named by nothing",
    ("_write_step", "if now >= log.look_at:", ">= -> >"): "a nanosecond later is as good",
    ("SessionSequence._export", "self._parts += 1", "1 -> 2"): _MOVED,
    ("SessionSequence.__init__", "self._parts = 0", "0 -> -1"): _MOVED,
    (
        "numbered_from",
        "if start is not None and start > 0:",
        "> -> >=",
    ): "a list that one name numbers from 0 is numbered so by all",
    ("Recorder._take_down", "actions.insert(0, self._steps_hook.remove)", "0 -> 1"): "each action is for itself",
    ("_let_stack_tracer_see_the_original", "_seen_by_tracer = True", "True -> False"): _ONLY_SPEED,
    (
        "",
        "_in_place = False  # whether ours is `Module.__call__`, or under somebody's who patched it later",
        "False -> True",
    ): "that the original is in place is asked beside it",
    (
        "_of_parts",
        'behind = (parts.get("backward", 0.0) + parts.get("recompute", 0.0)) / whole',
        "0.0 -> 1.0",
    ): "a nanosecond of a step",
    (
        "_verdict_dict",
        'found["differ_ms_per_step"] = None if step is None or ideal is None else max(0.0, step - ideal)',
        "or -> and",
    ): "both are known, or neither",
    (
        "_processes",
        'yield _named("process_sort_index", rank, 0, sort_index=place)',
        "0 -> 1",
    ): "what is said of a process has no thread",
    ("_Session.add", "if not len(listing):", "early return dropped"): "a moment without tensors tells nothing",
    ("FlopProbe.__init__", "self._thread = 0", "0 -> 1"): _UNREAD,
    ("SpanRecorder._drop_left_open", "if len(stack) > _MOST_OPEN:", "> -> >="): "asked where more are open",
    ("", "_PAUSE_S = 0.001", "0.001 -> 0.002"): "how soon it is looked again",
    (
        "FlopProbe.begin",
        "activities=machine_activities(), record_shapes=True, profile_memory=False, give_way=self._give_way",
        "False -> True",
    ): "what is allocated is recorded, and not counted",
    ("_Point", "step: int = 0  # that begins here", "0 -> -1"): "the default of a step's end, which nobody reads",
    ("is_locked", "return False", "False -> True"): "on Windows alone, the first of three",
    ("StepWatch.__init__", "layers: bool = False,", "False -> True"): _NOT_LEFT,
    (
        "BatchCounter.__init__",
        "self._saw_calls = False",
        "False -> True",
    ): "one of the steps that it looks for the model in",
}
