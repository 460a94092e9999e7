"""The lab: benchmarks, the paper's experiments, sweeps, comparisons and the demo.

Only commands import it.
"""
