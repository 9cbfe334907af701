"""Kernels: block attention on one device, without communication."""
