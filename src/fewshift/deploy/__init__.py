"""An adapted network where it has to run."""
