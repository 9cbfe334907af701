"""What surrounds attention and grows with the length: the loss behind the head, and MLPs, piece by piece."""
