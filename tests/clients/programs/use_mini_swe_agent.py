"""mini-swe-agent: its default agent on a task, ten steps; the commands that the model writes are not carried out."""

from typing import Any

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from said import BASE_URL, KEY, MODEL, say

# settings
from minisweagent.models.litellm_model import LitellmModel

settings = {
    "model_name": f"openai/{MODEL}",
    "model_kwargs": {"api_base": BASE_URL, "api_key": KEY, "tool_choice": "required", "parallel_tool_calls": False},
    "cost_tracking": "ignore_errors",  # no price is known of the model
}
# end


class Nowhere:
    """An environment that carries out nothing: what a small model writes into a shell is no command."""

    config: Any = None

    def execute(self, action: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"output": "command not found", "returncode": 127, "exception_info": ""}

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {"system": "Linux", "release": "6", "version": "1", "machine": "x86_64", "cwd": "/", **kwargs}

    def serialize(self) -> dict[str, Any]:
        return {}


config = yaml.safe_load((builtin_config_dir / "default.yaml").read_text())
model = LitellmModel(**config["model"] | settings)
agent = DefaultAgent(model, Nowhere(), **config["agent"] | {"step_limit": 10})
ended = agent.run("Fix the bug in the file `lookup.py`.")
say("ten steps", f"{agent.n_calls} calls of the model, {len(agent.messages)} messages, ended: {ended}")
