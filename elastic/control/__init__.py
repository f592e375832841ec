"""The control plane: who is there, what the plan is, and who carries it out."""
