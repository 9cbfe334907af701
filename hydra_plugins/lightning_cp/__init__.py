"""What Hydra finds by itself: the launcher of sweeps, and ``strategy=ulysses_ring`` for any application."""
