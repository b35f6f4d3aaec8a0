"""aiperf, as a command: a benchmark of synthetic prompts over chat, streamed."""

import subprocess
import sys
from pathlib import Path

from said import BASE_URL, FOLDER, MODEL, TOKENIZER, say

# settings
command = ["aiperf", "profile", "--url", BASE_URL.removesuffix("/v1"), "--model", MODEL]
offline = ["--tokenizer", TOKENIZER]  # a folder with the model's tokenizer
# end
asked = ["--endpoint-type", "chat", "--streaming", "--request-count", "8", "--concurrency", "2", "--ui", "none"]
sizes = [
    "--synthetic-input-tokens-mean",
    "64",
    "--output-tokens-mean",
    "16",
    "--output-artifact-dir",
    f"{FOLDER}/aiperf",
]
done = subprocess.run(
    [Path(sys.executable).parent / command[0], *command[1:], *offline, *asked, *sizes],
    capture_output=True,
    text=True,
    timeout=900,
    cwd=FOLDER,
)
assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
say("profile", done.stdout[-200:])
