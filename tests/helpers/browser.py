"""A tab of a real browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ViewportSize

PHONE = 500  # pixels: narrower screens are phones


@dataclass
class Tab:
    """One tab of the browser: what the page in it loaded, and what it logged."""

    browser: Browser
    requests: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    def open(self, path: Path, width: int, scheme: Literal["light", "dark"] = "light") -> None:
        """Load a page from disk with all its folds open; a narrow one as a phone would."""
        size: ViewportSize = {"width": width, "height": 800}
        context = self.browser.new_context(viewport=size, screen=size, color_scheme=scheme, is_mobile=width < PHONE)
        self.page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.logged.append(message.text))
        self.page.on("pageerror", lambda error: self.logged.append(error.message))
        self.page.goto(path.as_uri())
        self.value("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(script)

    @property
    def loaded(self) -> list[str]:
        """Every address that was asked for, the page's own first; what the page carries itself does not count."""
        return [address for address in self.requests if not address.startswith("data:")]
