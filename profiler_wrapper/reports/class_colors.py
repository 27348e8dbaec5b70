"""The colours of classes of events and of parts of a step: one for each in every view of the page.

Chosen to be told apart on white and on dark paper; those that Okabe and Ito ("Color Universal Design", 2008) have
are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

CLASS_COLORS: Mapping[str, str] = {
    "gemm": "#0072B2",
    "attention": "#D55E00",
    "norm": "#009E73",
    "softmax": "#CC79A7",
    "elementwise": "#56B4E9",
    "reduction": "#B5A300",
    "embedding": "#A05195",
    "copy": "#8C6D31",
    "communication": "#E69F00",
    "optimizer": "#7B6FD0",
    "other": "#999999",
}
SPLIT_COLORS: Mapping[str, str] = {
    "kernel": "#0072B2",
    "memcpy": "#8C6D31",
    "memset": "#CC79A7",
    "communication": "#E69F00",
    "runtime": "#D55E00",
    "dataloader": "#882255",
    "cpu": "#009E73",
    "other": "#999999",
}
