"""Memory savings per token: chunked losses, tiled MLPs, recomputation, offloading to the host."""
