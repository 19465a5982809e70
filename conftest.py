"""What all tests get, wherever they are: the plugin that users of chatflow have too, and Hypothesis' settings."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["chatflow.testing.plugin"]

# How long an example takes says more about the machine than about the code, so neither profile looks at time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), print_blob=True, derandomize=False, max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
