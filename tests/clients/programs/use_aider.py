"""aider, as a command: asks the model to edit a file, twice."""

import subprocess
import sys
from pathlib import Path

from said import BASE_URL, FOLDER, KEY, MODEL, say

folder = Path(FOLDER) / "aider"
folder.mkdir(exist_ok=True)
(folder / "hello.py").write_text("print('hello')\n")
short = f"- name: openai/{MODEL}\n  extra_params: {{max_tokens: 200}}\n"  # a small model does not know when to end
(folder / ".aider.model.settings.yml").write_text(short)
# settings
command = ["aider", "--model", f"openai/{MODEL}", "--openai-api-base", BASE_URL, "--openai-api-key", KEY]
offline = ["--no-check-update", "--analytics-disable", "--no-show-release-notes", "--no-show-model-warnings"]
# end
asked = ["--yes-always", "--no-git", "--no-pretty", "--no-suggest-shell-commands", "--map-tokens", "0"]
for kind in ("chat", "input"):  # else they lie at the head of the repository that the folder is in
    asked += [f"--{kind}-history-file", str(folder / f"{kind}.txt")]
for name in ("ask", "ask again"):
    done = subprocess.run(
        [
            Path(sys.executable).parent / command[0],
            *command[1:],
            *offline,
            *asked,
            "--message",
            "Greet in French.",
            "hello.py",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    say(name, [line for line in done.stdout.splitlines() if "tokens" in line.lower()][:3])
