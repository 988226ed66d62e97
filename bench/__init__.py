"""Benchmarks: workloads over targets, with the raw device and the usual tools in the same run."""
