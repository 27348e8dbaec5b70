"""What a job would take if some of its operations were as quick as others of their kind."""
