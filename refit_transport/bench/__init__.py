"""Benchmarks: real ranks as processes, on one host or on an emulated cluster, beside what users would pick instead."""
