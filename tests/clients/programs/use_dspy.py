"""dspy: a prediction by its chat form and by its JSON form."""

from typing import Literal

from said import BASE_URL, KEY, MODEL, say

# settings
import dspy

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, max_tokens=200))
# end


class Recommend(dspy.Signature):
    """Recommend a book."""

    wish: str = dspy.InputField()
    title: Literal["Walden", "Emma", "Dracula"] = dspy.OutputField()


for adapter in (dspy.JSONAdapter(), dspy.ChatAdapter()):
    for name in ("predict", "predict again"):
        try:
            with dspy.context(adapter=adapter):
                came = dspy.Predict(Recommend)(wish="something old").title
        except Exception as error:  # the chat form asks in words: a small model does not follow it
            if "AdapterParseError" not in type(error).__name__:
                raise
            came = f"answered, and the model's text did not fit: {str(error)[:80]}"
        say(f"{type(adapter).__name__}: {name}", came)
