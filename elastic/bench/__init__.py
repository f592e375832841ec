"""Benchmarks of our own parts against peers on the same work in the same run: ``elastic bench …``."""
