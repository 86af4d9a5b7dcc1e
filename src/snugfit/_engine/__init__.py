"""What runs the public functions: from a request to a plan, from a plan to a record, from a run folder to a model."""
