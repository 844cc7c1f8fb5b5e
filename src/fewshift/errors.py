"""The one exception of the library."""

from __future__ import annotations


class FewshiftError(ValueError):
    """A mistake the user can mend: one lower-case sentence that states the facts and ends in what to do."""


class DivergedError(FewshiftError):
    """Gradient steps went astray; other candidates may do."""


class NotFiniteError(FewshiftError):
    """A layer sees NaN or infinity; other statistics may do."""
