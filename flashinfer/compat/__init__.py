"""Private names that engines reach for on wrappers; what comes of them is in flashinfer/ops/attention/replaced.py."""
