"""Files to tensors and back: folders of images, scenes with a label for every pixel, and preprocessing."""
