"""What could be better, with evidence from the run: one rule a function, all of them asked by `advise`."""
