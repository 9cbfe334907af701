"""Tests of the benchmarks: that they measure the right thing; how fast anything is decides nothing."""
