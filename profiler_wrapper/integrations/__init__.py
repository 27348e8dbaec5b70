"""Callbacks for the loops of others: `transformers`, `lightning`; each imports what it is for."""
