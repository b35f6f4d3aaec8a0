"""lm-eval: a task of generation over chat and over plain completions, and one of multiple choice."""

import json
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from said import BASE_URL, FOLDER, MODEL, TOKENIZER, say

folder = Path(FOLDER) / "tasks"
folder.mkdir(exist_ok=True)
rows = [
    {"question": f"Which number follows {i}?", "choices": [str(i + 1), str(i + 7)], "answer": 0, "text": str(i + 1)}
    for i in range(4)
]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
HEAD = f"""
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder / "rows.jsonl"}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOOSE = HEAD + 'task: choose\noutput_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
WRITE = HEAD + (
    'task: write\noutput_type: generate_until\ndoc_to_target: "{{text}}"\n'
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 16}\nmetric_list: [{metric: exact_match}]\n'
)
(folder / "choose.yaml").write_text(CHOOSE)
(folder / "write.yaml").write_text(WRITE)
# settings
server = {"model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": TOKENIZER}  # the tokenizer's folder
chat = {"model": MODEL, "base_url": f"{BASE_URL}/chat/completions"}
# end
tasks = TaskManager(include_path=str(folder), include_defaults=False)
for name, kind, settings, templated in (
    ("choose", "local-completions", server, False),
    ("write", "local-completions", server, False),
    ("write", "local-chat-completions", chat, True),
):
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=settings,
        tasks=[name],
        task_manager=tasks,
        apply_chat_template=templated,
        num_fewshot=0,
        bootstrap_iters=0,
    )
    say(f"{kind}: {name}", {k: v for k, v in found["results"][name].items() if isinstance(v, float)})
