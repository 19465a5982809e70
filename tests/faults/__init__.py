"""Fault injection with real processes: ``python -m tests.faults``, or ``make faults``."""
