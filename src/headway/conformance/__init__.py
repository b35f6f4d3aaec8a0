"""Right answers of the cache as data: a form for small worlds, and a runner that compares.

`load` reads files, `run` plays one scenario and returns a `Report`, and `headway check FILE...` does both.
The form is documented in `tests/conformance/README.md`.
"""

from headway.conformance.form import Scenario, load, read
from headway.conformance.report import Failure, Report
from headway.conformance.runner import run
from headway.errors import ScenarioError

__all__ = ["Failure", "Report", "Scenario", "ScenarioError", "load", "read", "run"]
