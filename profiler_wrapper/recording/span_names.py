"""What kind of work a span is, and who takes part in it, by the names that training frameworks give."""

from __future__ import annotations

import re
from functools import lru_cache

# The first that matches counts. In lower case, words apart by one blank: "forward send", "params all gather".
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("gc", r"\b(gc|garbage)\b"),
        (
            "communication",
            r"\b(i?send|i?recv|receive|p2p|all ?reduce|reduce ?scatter|all ?gather|all ?to ?all|alltoallv?|broadcast|"
            r"bcast|barrier|nccl|rccl|gloo|c10d|comm|comms|communication|clip|grad ?norm|finalize model grads)\b",
        ),
        ("checkpoint", r"\b(checkpoint save|save checkpoint|checkpoint|ckpt)\b"),
        ("recompute", r"\brecompute\w*\b"),
        (
            "data",
            r"\b(data|dataloader|dataloading|batch generator|(get|next|load|fetch) batch)\b|"
            r"^(load|loading|loader|fetch)$",
        ),
        ("optimizer", r"\b(optimizer|optim|adamw?|sgd|zero grad)\b|^opt( step)?$"),
        ("backward", r"\b(backward|bwd|wgrad|dgrad)\b"),
        ("forward", r"\b(forward|fwd|loss)\b"),
        ("step", r"^(train |training )?(step|iteration|iter|interval time)$|^profilerstep\b"),
    )
)
# Of each kind some of the words by which a name tells it, as helps have them.
KNOWN_NAMES = {
    "data": "data, dataloader, load, get_batch, next_batch",
    "forward": "forward, fwd, loss",
    "recompute": "recompute",
    "backward": "backward, bwd, wgrad, dgrad",
    "communication": "all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, barrier, send, recv, grad_norm",
    "optimizer": "optimizer, optim, opt, adam, sgd, zero_grad",
    "gc": "gc, garbage",
    "checkpoint": "checkpoint, ckpt",
    "step": "step, train_step, iteration",
}

_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# Of a name in a table that has no groups: who takes part.
ALL, STAGE, EMBEDDING, OWN, PAIR = "all", "stage", "embedding", "own", "pair"
_GROUPS = tuple(
    (group, re.compile(pattern))
    for group, pattern in (
        (PAIR, r"\b(i?send|i?recv|receive)\b"),
        (ALL, r"\b(clip|grad ?norm)\b"),  # the norm of all gradients
        (EMBEDDING, r"\bembedding\b"),  # of the first and the last stage
        (OWN, r"\blayer ?norm\b"),  # of tensor parallel ranks, which share a rank here
    )
)


@lru_cache(maxsize=4096)
def words_of(name: str) -> str:
    """`"forward-send"`, `"ForwardSend"`, `"forward_send"` -> `"forward send"`."""
    return _BETWEEN_WORDS.sub(" ", _CAMEL.sub(" ", name).lower()).strip()


@lru_cache(maxsize=4096)
def kind_of_span(name: str) -> str:
    """One of `KINDS`, as the name tells; "other" where it does not."""
    words = words_of(name)
    return next((kind for kind, pattern in _KINDS if pattern.search(words)), "other")


def group_of_span(name: str) -> str:
    """Who takes part in a communication of this name, by the custom of Megatron: ranks of one stage, if nothing else.

    Returns:
        One of `ALL`, `STAGE`, `EMBEDDING`, `OWN` and `PAIR`.
    """
    words = words_of(name)
    return next((group for group, pattern in _GROUPS if pattern.search(words)), STAGE)


def sends_forward(name: str) -> bool | None:
    """Whether a send or receive carries activations from a stage to the next; None: gradients the other way."""
    words = words_of(name)
    if "backward" in words or "grad" in words:
        return False
    return True if "forward" in words or "activation" in words else None


def receives(name: str) -> bool:
    """Whether a span of this name waits for what another rank sends."""
    return re.search(r"\b(i?recv|receive)\b", words_of(name)) is not None
