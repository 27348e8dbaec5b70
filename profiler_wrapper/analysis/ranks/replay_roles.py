"""What an operation does in a job, told from its name: computes, sends, receives, meets others, or none of these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Direction = Literal["forward", "backward", ""]
Scope = Literal["itself", "tensor", "replicas", "ends", "all"]
Part = tuple[Literal["send", "receive"], Direction]

_DIRECTIONS: Final[dict[str, Direction]] = {
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
}
_VERBS: Final[dict[str, Literal["send", "receive"]]] = {
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "receive": "receive",
}
# Megatron's timers: this one holds the all-reduce of the gradients' norm over the whole job.
_CLIPS: Final = ("optimizer-clip-main-grad",)


@dataclass(frozen=True, slots=True)
class Role:
    """An operation's place in the dependencies.

    `parts` of a point-to-point transfer: ("send", "forward") and so on, two where one span is of two transfers.
    `scope` of a collective: "replicas" are the ranks of its stage with its share of the tensors, "tensor"
    the ranks that share its tensors, "ends" the first and the last stage of its pipeline, "all" the job.
    """

    what: Literal["compute", "transfer", "collective", "local"]
    direction: Direction = ""
    parts: tuple[Part, ...] = ()
    scope: Scope = "itself"
    gathers: bool = False  # parameters, before they are used
    reduces: bool = False  # gradients, once they are there
    family: str = ""  # what is reported together: both ends of a transfer

    @property
    def meets(self) -> bool:
        """Whether its typical length is a median: transfers have long tails that the network makes, not the rank."""
        return self.what in ("transfer", "collective")


def role_of(name: str, kind: str) -> Role:
    """The role of an operation, by its name and its kind in the span table."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if kind in ("forward", "backward", "recompute") and not any(word in _VERBS for word in words):
        weights = kind == "backward" and any(word in ("weight", "weights", "wgrad") for word in words)
        if kind == "recompute" or weights:  # of no transfer: nobody waits for it by itself
            return Role("local", family=name)
        return Role("compute", direction="forward" if kind == "forward" else "backward", family=name)
    plain = "-".join(words)
    if kind != "communication" and plain not in _CLIPS:
        return Role("local", family=name)
    parts = _parts(words)
    if parts:
        directions = {direction for _, direction in parts}
        return Role("transfer", parts=parts, family=f"{directions.pop()} transfer" if len(directions) == 1 else name)
    return _collective(name, plain, set(words))


def _parts(words: list[str]) -> tuple[Part, ...]:
    """Of "forward-send-backward-recv" (timers) or "send_forward_recv_backward" (functions)."""
    told = [word for word in words if word in _VERBS or word in _DIRECTIONS]
    verbs = [word for word in told if word in _VERBS]
    if len(verbs) == len(told):
        return tuple((_VERBS[word], "") for word in verbs)
    if len(told) != 2 * len(verbs):
        return ()
    pairs = [(told[i], told[i + 1]) for i in range(0, len(told), 2)]
    if all(first in _VERBS and second in _DIRECTIONS for first, second in pairs):
        return tuple((_VERBS[first], _DIRECTIONS[second]) for first, second in pairs)
    if all(first in _DIRECTIONS and second in _VERBS for first, second in pairs):
        return tuple((_VERBS[second], _DIRECTIONS[first]) for first, second in pairs)
    return ()


def _collective(name: str, plain: str, words: set[str]) -> Role:
    if plain in _CLIPS or ("norm" in words and "layer" not in words):
        return Role("collective", scope="all", family=name)
    if "embedding" in words or "embeddings" in words:
        return Role("collective", scope="ends", family=name)
    if "layernorm" in words or "tp" in words or "tensor" in words:
        return Role("collective", scope="tensor", family=name)
    gradients = bool(words & {"grad", "grads", "gradient", "gradients"})
    scatters = "reduce-scatter" in plain or "reducescatter" in words
    return Role(
        "collective",
        scope="replicas",
        gathers="all-gather" in plain or "allgather" in words,
        reduces="separate" not in words and (scatters or gradients),
        family=name,
    )
