"""``python -m lightning_cp.doctor``: does the configured model compute the same context parallel?"""
