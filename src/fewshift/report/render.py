"""Templates into text: everything that comes from outside is escaped, and a fact that is missing is an error."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fewshift.report import choosing
from fewshift.report import prose as words


def rendered(template: str, **facts: Any) -> str:
    """The text of a page, or of a part of one."""
    return _environment().get_template(template).render(words=words, choosing=choosing, **facts)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("fewshift.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
