"""The report: what became of every parameter, in text, data, pages and graphs."""

from kfac_fx.report.report import Report

__all__ = ["Report"]
