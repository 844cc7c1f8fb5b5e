"""Experiments as data: a cell names one completely, a record is its result, a grid is many cells."""
