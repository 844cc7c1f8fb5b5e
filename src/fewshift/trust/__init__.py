"""Whether to believe an adaptation: held-out images, gains with intervals, the guard."""
