"""Layers that training algorithms put into networks."""
