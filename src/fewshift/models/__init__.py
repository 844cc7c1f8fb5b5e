"""Names to networks: libraries, weights, cards."""
