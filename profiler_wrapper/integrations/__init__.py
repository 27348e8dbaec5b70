"""Callbacks for the loops of others: `integrations.transformers`, `integrations.lightning`; `flagscale` has its hooks.

Each module imports the package it is for; this one imports none.
"""

from __future__ import annotations
