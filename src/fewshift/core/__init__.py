"""Tensors and modules: networks, supports, statistics, losses. No paths, no data sets."""
