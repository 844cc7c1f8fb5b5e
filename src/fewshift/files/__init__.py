"""Files of people and of ours, below everything else: reading text that may be anything, appending lines whole."""
