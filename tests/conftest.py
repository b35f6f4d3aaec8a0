"""What every test has in common: threads, no network, and how Hypothesis runs.

`HYPOTHESIS_PROFILE` chooses a profile: `ci` (the default) as every change is tested, `quick` while writing,
`long` for a search through the night. No profile is derandomised: each run tries new examples, and prints how
to repeat one that fails.
"""

import os

# Before torch is imported: as many processes as cores run tests already, and no test may fetch anything.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

_PATIENT = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("ci", deadline=None, derandomize=False, print_blob=True, suppress_health_check=_PATIENT)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.register_profile("long", settings.get_profile("ci"), max_examples=50_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
