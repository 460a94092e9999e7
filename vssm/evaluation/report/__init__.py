"""The report of runs and results: one HTML page."""

from vssm.evaluation.report.page import report as report
