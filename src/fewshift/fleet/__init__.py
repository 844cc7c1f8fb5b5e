"""Many places at once: one network, a delta for each place, one table at the end."""
