"""``self.log`` on many ranks with the values of one process."""
