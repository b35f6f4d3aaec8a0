"""cache-pressure, as a command: how much a prefix cache keeps under pressure."""

import subprocess
import sys
from pathlib import Path

from said import BASE_URL, FOLDER, MODEL, say

# settings
command = ["cache-pressure", "--base-url", BASE_URL, "--model", MODEL]
# end
asked = ["--kv-size", "8000", "--context-tokens", "2000", "--num-contexts", "3", "--output", f"{FOLDER}/pressure.json"]
done = subprocess.run(
    [Path(sys.executable).parent / command[0], *command[1:], *asked], capture_output=True, text=True, timeout=900
)
assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
say("three contexts", done.stdout[-200:])
