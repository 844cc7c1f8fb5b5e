"""Pages that a colleague can read: one HTML file each, with everything inside."""

from fewshift.report.pages import adaptation_page, comparison_page, curve_page, demo_page, evaluation_page

__all__ = ["adaptation_page", "comparison_page", "curve_page", "demo_page", "evaluation_page"]
