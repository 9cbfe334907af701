"""What the two strategies do to save and load: their hooks over ``lightning_cp.checkpoint``."""
