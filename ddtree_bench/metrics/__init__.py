"""Pure folds from request records to numbers; nothing here measures, waits or talks to a server.

One formula for each word, written down in `docs/metrics.md`. Modules: `latency`, `throughput`, `acceptance`, `intervals`,
`distinct`, `summary`, `comparison`. Unknown is None, never 0.
"""
