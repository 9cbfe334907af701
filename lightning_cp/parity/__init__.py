"""The doctor: a model's step on one process and context parallel, compared, and what makes them differ."""
