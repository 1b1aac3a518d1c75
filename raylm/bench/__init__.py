"""Benchmarks: offline throughput and latency, load on a server, start-up. JSON lines and a table come out."""
