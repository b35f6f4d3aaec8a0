"""vLLM's benchmark client: random prompts with a common prefix, over plain completions and over chat."""

import os
import subprocess
import sys

from said import BASE_URL, MODEL, TOKENIZER, say

# settings
command = ["vllm", "bench", "serve", "--base-url", BASE_URL.removesuffix("/v1"), "--model", MODEL]
offline = ["--tokenizer", TOKENIZER]  # a folder with the model's tokenizer
# end
# What `vllm bench serve` runs: a vLLM for CPUs is installed under another name, which the command itself does not find.
RUN = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
sizes = [
    "--dataset-name",
    "random",
    "--random-input-len",
    "48",
    "--random-output-len",
    "16",
    "--random-prefix-len",
    "64",
]
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    kind = ["--backend", backend, "--endpoint", path, "--num-prompts", "8", "--max-concurrency", "2"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *command[3:], *offline, *sizes, *kind],
        capture_output=True,
        text=True,
        timeout=900,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = [line for line in done.stdout.splitlines() if line.startswith(("Successful", "Failed", "Mean TTFT"))]
    assert any("Successful" in line and line.split()[-1] == "8" for line in told), done.stdout
    say(backend, told)
