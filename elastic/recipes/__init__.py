"""Jobs that ship with the runtime: ready to run, and examples to start your own from."""
