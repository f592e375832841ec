"""Sharded checkpoints in object storage: absent, or whole and verified."""
