"""A recording in, a frozen result out: no files, no drawing."""
