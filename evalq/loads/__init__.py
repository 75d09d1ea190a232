"""Throughput and latency as pure arithmetic: figures of event lists, their validity, their spread, the device's health."""
