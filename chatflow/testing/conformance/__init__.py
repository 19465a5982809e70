"""What every store promises. Run with ``-p chatflow.testing.plugin --chatflow-store MODULE:NAME``."""
