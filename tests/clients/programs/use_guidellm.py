"""guidellm, as a command: a benchmark of synthetic prompts, one at a time and four at once."""

import subprocess
import sys
from pathlib import Path

from said import BASE_URL, FOLDER, MODEL, TOKENIZER, say

# settings
command = ["guidellm", "run", "--backend", f"kind=openai_http,target={BASE_URL},model={MODEL}"]
offline = ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]  # a folder with the model's tokenizer
# end
sizes = ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--disable-progress"]
for profile in ("kind=synchronous", "kind=concurrent,streams=4"):
    asked = ["--profile", profile, "--constraint", "kind=max_requests,count=8", "--output", "kind=console"]
    done = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:], *offline, *asked, *sizes],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=FOLDER,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith(("| sync", "| conc"))]
    completed, incomplete, failed = (int(cell) for cell in rows[0][7:10])
    assert completed, done.stdout
    assert not failed, done.stdout
    say(profile, f"{completed} completed, {incomplete} incomplete, {failed} failed")
