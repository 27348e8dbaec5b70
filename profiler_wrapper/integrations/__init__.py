"""Callbacks for the loops of others: `transformers`, `lightning`, `flagscale`; each imports what it is for."""
