"""llm, Simon Willison's package: prompts, a conversation, a schema, tools."""

import os
from pathlib import Path

from said import BASE_URL, FOLDER, KEY, MODEL, RULES, say

# settings
os.environ["LLM_USER_PATH"] = FOLDER
models = f"- model_id: headway\n  model_name: {MODEL}\n  api_base: {BASE_URL}\n  supports_schema: true\n"
Path(FOLDER, "extra-openai-models.yaml").write_text(models)
# end
import llm  # it reads the file above

model = llm.get_model("headway")
for name in ("prompt", "prompt again"):
    say(name, model.prompt("Who are you?", system=RULES, key=KEY, max_tokens=48).text())
talk = model.conversation()
talk.prompt("Who are you?", system=RULES, key=KEY, max_tokens=48).text()
say("conversation", talk.prompt("And what can you do?", key=KEY, max_tokens=48).text())
schema = {"type": "object", "properties": {"title": {"enum": ["Walden", "Emma"]}}, "required": ["title"]}
say("schema", model.prompt("A book?", schema=schema, key=KEY).json())
