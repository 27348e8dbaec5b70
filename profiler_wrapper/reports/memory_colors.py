"""The colours of memory: one for each category in every picture and page, and for the rings of a sunburst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiler_wrapper.analysis.memory_model import MemoryCategory

# Okabe and Ito, "Color Universal Design" (2008): told apart with any colour vision.
CATEGORY_COLORS: Mapping[MemoryCategory, str] = {
    "params": "#0072B2",
    "grads": "#E69F00",
    "os_params": "#CC79A7",
    "os_state": "#D55E00",
    "activation": "#009E73",
    "communication": "#F0E442",
    "workspace": "#56B4E9",
    "other": "#999999",
}
PLAIN = "#c3c8cf"  # of a name that only holds others
ROLE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#8c6bb1")
_LIGHTER, _OTHER = 0.16, 0.22  # of a ring against the one inside it; of every other sector
_WHITE = 255


def ring_colors(
    parents: Sequence[int | None], labels: Sequence[str], sizes: Sequence[int], fixed: Mapping[int, str]
) -> list[str]:
    """A colour for each sector of a sunburst; parents stand before their children.

    Names that only lead to numbered layers, and these, are plain. Below them like names have like
    colours, the largest the first ones, and each ring is lighter than the one inside it. `fixed`
    gives sectors that have their colour already.
    """
    leads = [label.isdecimal() for label in labels]  # to a number, or is one
    for i in range(len(parents) - 1, 0, -1):
        parent = parents[i]
        if parent is not None:
            leads[parent] = leads[parent] or leads[i]
    plain = [False] * len(parents)
    role: list[str | None] = [None] * len(parents)
    by_role: dict[str, int] = {}
    for i, parent in enumerate(parents):
        if i in fixed:
            continue
        if parent is None or (plain[parent] and leads[i]):
            plain[i] = True
        elif plain[parent]:
            role[i] = labels[i]
            by_role[labels[i]] = by_role.get(labels[i], 0) + sizes[i]
    first = sorted(by_role, key=lambda name: -by_role[name])
    colors = {name: ROLE_COLORS[i % len(ROLE_COLORS)] for i, name in enumerate(first)}
    found: list[str] = []
    for i, parent in enumerate(parents):
        name = role[i]
        if i in fixed:
            color = fixed[i]
        elif name is not None:
            color = colors[name]
        elif plain[i] or parent is None:
            color = PLAIN
        else:
            color = mixed(found[parent], _LIGHTER)
        is_odd = labels[i].isdecimal() and int(labels[i][-1]) % 2 == 1
        found.append(mixed(color, _OTHER) if is_odd else color)
    return found


def mixed(color: str, share: float) -> str:
    """`color` (`#rrggbb`) with so much white in it: 0 none, 1 all."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (_WHITE - part) * share):02x}" for part in parts)


def ink_on(color: str) -> str:
    """Black or white, whichever is read more easily on `color`."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 118 else "#ffffff"
