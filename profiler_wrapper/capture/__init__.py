"""What touches torch at run time: the profiler session, the layer marks, the machine."""
