"""Points faults at a job and tells whether it survived: scenarios and oracles are pure, injectors do the real thing."""
