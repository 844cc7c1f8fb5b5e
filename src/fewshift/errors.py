"""The one exception of the library, and the one of the system that it words."""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # how the system says that a disk is full


class FewshiftError(ValueError):
    """A mistake the user can mend: one lower-case sentence that states the facts and ends in what to do."""


class DivergedError(FewshiftError):
    """Gradient steps went astray; other candidates may do."""


class NotFiniteError(FewshiftError):
    """A layer sees NaN or infinity; other statistics may do."""
