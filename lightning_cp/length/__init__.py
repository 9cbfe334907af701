"""Memory around attention that grows with the length: the loss behind the head, and MLPs, piece by piece."""
