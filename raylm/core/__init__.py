"""Scheduling and KV cache: pure state machines of the standard library (no torch, no Ray, no clock, no I/O)."""
