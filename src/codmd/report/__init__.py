"""The page that shows what came out: one file, no network, videos side by side under one clock."""

from codmd.report.page import write_page
from codmd.report.result import Check, Column, Curve, DemoResult, Shot

__all__ = ["Check", "Column", "Curve", "DemoResult", "Shot", "write_page"]
