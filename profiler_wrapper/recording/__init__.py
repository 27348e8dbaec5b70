"""What was measured: a trace as columns, its reader, and a run on disk. Data, nothing else."""
