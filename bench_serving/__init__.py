"""Benchmarks. Each prints its baseline beside its figures; run as `python -m bench_serving.<name>`."""
