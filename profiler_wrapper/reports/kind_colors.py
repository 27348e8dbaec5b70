"""The colours of kinds of layers: one for each in every picture and page.

Told apart with any colour vision (Okabe and Ito, "Color Universal Design", 2008), and by their names.
"""

from __future__ import annotations

from collections.abc import Mapping

KIND_COLORS: Mapping[str, str] = {
    "attention": "#D55E00",
    "mlp": "#0072B2",
    "expert": "#0072B2",
    "router": "#56B4E9",
    "norm": "#009E73",
    "embedding": "#CC79A7",
    "head": "#E69F00",
    "block": "#332288",
    "conv": "#882255",
}
OTHER_KIND = "#777777"
