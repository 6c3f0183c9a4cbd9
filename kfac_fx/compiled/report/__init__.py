"""The report: the Fisher block of every parameter, as text, data, page and graph."""

from kfac_fx.compiled.report.report import Report

__all__ = ["Report"]
