"""Evaluation of a run: likelihoods, times, and the quality of samples."""

from vssm.evaluation.scores import evaluate_run as evaluate_run
