"""Many jobs: each has a key and leaves a record; processes or a Ray cluster run what has none yet."""
