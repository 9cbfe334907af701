"""``self.log`` on many ranks as on one process."""
