"""Experiments: data sets, source training, the benchmark and its grids, the demonstration."""
