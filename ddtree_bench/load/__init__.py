"""The load generator: arrivals, prompts, the streaming client and the runner that puts them together.

Owns what is sent and when, and one `RequestRecord` for each request. Leaves every formula over records to
`ddtree_bench.metrics`. Modules: `arrivals`, `workloads`, `sse`, `recorder`, `client`, `server_metrics`, `runner`, `mock`.
"""
