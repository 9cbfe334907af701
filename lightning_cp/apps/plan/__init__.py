"""Planning a run from the command line, and checking a plan without its machines."""
