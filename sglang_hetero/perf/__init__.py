"""What a request's hand-over took, per rank: one log line, metrics, and a trace (docs/perf.md). No torch, no SGLang."""
