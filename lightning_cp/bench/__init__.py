"""Measuring what a machine reaches. Nothing here decides a test."""
