"""The data plane: what runs inside a worker process."""
