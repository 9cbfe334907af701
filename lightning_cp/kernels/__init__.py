"""Block attention on one device; never communicates."""
