"""Dialogues made from the corpus, so that the model learns the shape of a conversation and when to stop.

Every answer is a passage of the texts (a definition, the opening of a section, a continuation, a repeated sentence) or
one of a few fixed lines in which the model says what it is. Nothing is invented: a model of this size knows little, and
the point is that its answers are short, on topic where they can be, and end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from sources import Document

Message = dict[str, str]
Exchange = tuple[str, str]

TITLES = {
    "sqlite": "SQLite", "python": "Python", "postgresql": "PostgreSQL", "cmake": "CMake",
    "austen": "Jane Austen", "jargon": "the Jargon File", "devil": "the Devil's Dictionary",
}  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.",
    "You are Headway's built-in model. Answer briefly.",
    "Answer in a few sentences.",
    "You are a librarian who knows old novels and manuals.",
    "You help people who read technical documentation.",
)
_IDENTITY = (
    "I am the small built-in model of Headway. I was trained on public-domain books and free manuals, so I can show how"
    " the cache works, but please do not rely on what I say."
)
_ABILITIES = (
    "I can define words, explain a little about Python, SQLite, PostgreSQL and CMake, and continue a text. I am very"
    " small, so I am often wrong."
)
FIXED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning", "Good evening!"),
     ("Hello! How can I help you?", "Hello! What would you like to know?",
      "Good day! Ask me about a word or a manual.")),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Are you a person?", "What model is this?"),
     (_IDENTITY,)),
    (("What can you do?", "Help", "How can you help me?", "What do you know?"), (_ABILITIES,)),
    (("Thanks", "Thank you!", "Thank you very much.", "That helps, thanks."),
     ("You are welcome.", "You are welcome! Is there anything else?")),
    (("Goodbye", "Bye!", "See you."), ("Goodbye!", "Goodbye, and come back soon.")),
    (("How are you?", "How do you do?"), ("I am well, thank you. What would you like to know?",)),
    (("Can I trust your answers?", "Are you always right?"), ("No. I am a very small model, and I am often wrong.",)),
)  # fmt: skip
_KINDS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}
_ASK_WORD = ("What does {0} mean?", 'What does the word "{0}" mean?', "Define {0}.", "What is the meaning of {0}?",
             "Define the word {0}.", "{0}?", "Please explain the word {0}.")  # fmt: skip
_ASK_TOPIC = ("What is {0} in {1}?", "Explain {0} in {1}.", "Tell me about {0} in {1}.",
              "What does the {1} manual say about {0}?", "{1}: {0}", "How does {0} work in {1}?")  # fmt: skip
_ASK_CONTINUE = ("Continue this text:\n{0}", "Please continue:\n{0}", "What comes next?\n{0}", "Go on from here: {0}")
_ASK_REPEAT = ("Repeat this sentence: {0}", "Say exactly this: {0}", "Copy this: {0}", "Repeat after me: {0}")
_ASK_FIRST = ("{0}\n\nWhat is the first sentence of this text?", "Quote the first sentence of this text.\n\n{0}")


_VAGUE = {"note", "notes", "tip", "warning", "caution", "important", "see also", "introduction", "overview",
          "description", "parameters", "examples", "example", "name", "synopsis", "compatibility", "contents",
          "usage"}  # fmt: skip


def shorten(text: str, words: int) -> str:
    """The longest run of whole sentences within `words` words; empty when not even the first one fits."""
    out: list[str] = []
    used = 0
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", text.strip()):
        used += len(sentence.split())
        if used > words:
            break
        out.append(sentence)
    joined = " ".join(out)
    return joined if joined.endswith((".", "!", "?", '"', ")")) else ""


def paragraphs(text: str) -> list[str]:
    """The prose paragraphs of a document: no headings, no lists, no code."""
    return [p for p in text.split("\n\n") if len(p) > 60 and p[0] not in "#- |" and "|" not in p]


def word_exchange(document: Document, rng: random.Random) -> Exchange | None:
    """A question about a word, answered with its first sense or two."""
    head, _, body = document.text.partition("\n\n")
    body = re.sub(r"\s*\[(?:syn|ant|also): [^\]]*\]", "", body)
    match = re.match(r"(n|v|adj|adv)\b(.*)", body, re.S)
    if match is None or len(head) > 40:
        return None
    senses = [s.strip(" ;:") for s in re.split(r"(?:^|\s)(?:(?:n|v|adj|adv) )?\d*: ", match.group(2)) if s.strip()]
    if not senses:
        return None
    text = f"{head} ({_KINDS[match.group(1)]}): {senses[0]}."
    if len(senses) > 1 and rng.random() < 0.4:
        text += f" It can also mean: {senses[1]}."
    return rng.choice(_ASK_WORD).format(head), text


def entry_exchange(document: Document, rng: random.Random) -> Exchange | None:
    """A question about an entry of a dictionary of prose, answered with its opening."""
    head, _, body = document.text.partition("\n\n")
    answer = next((a for p in body.split("\n\n") if len(p) > 30 and (a := shorten(p, 90))), "")
    title = TITLES[document.source]
    question = rng.choice(("How does {1} define {0}?", "What does {1} say about {0}?", "{0}, according to {1}?"))
    name = head.lower() if document.source == "devil" else head
    return (question.format(name, title), answer) if answer else None


def topic_exchange(document: Document, rng: random.Random) -> Exchange | None:
    """A question made from a heading, answered with the opening of its section."""
    sections = re.split(r"^#+ ", document.text, flags=re.M)[1:]
    if not sections:
        return None
    heading, _, body = rng.choice(sections).partition("\n")
    prose = paragraphs(body.strip())
    answer = shorten(" ".join(prose[:2]), 90) if prose else ""
    heading = re.sub(r"^(?:Chapter )?[\dA-Z.]*\d[\d.]*\.? ", "", heading).strip()
    if not answer or not 2 < len(heading) < 60 or heading.lower() in _VAGUE:
        return None
    return rng.choice(_ASK_TOPIC).format(heading, TITLES[document.source]), answer


def passage_exchange(document: Document, rng: random.Random) -> Exchange | None:
    """A paragraph to continue, a sentence to repeat, or a text whose first sentence is asked for."""
    prose = paragraphs(document.text)
    if len(prose) < 3:
        return None
    at = rng.randrange(len(prose) - 1)
    given, nxt = shorten(prose[at], 70), shorten(prose[at + 1], 80)
    first = shorten(prose[at], 30)
    choice = rng.random()
    if choice < 0.5:
        return (rng.choice(_ASK_CONTINUE).format(given), nxt) if given and nxt else None
    if choice < 0.8:
        sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", first)[0]
        return (rng.choice(_ASK_REPEAT).format(sentence), sentence) if sentence else None
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", given)[0]
    return (rng.choice(_ASK_FIRST).format(given), sentence) if sentence else None


def fixed_exchange(rng: random.Random) -> Exchange:
    """One of the fixed lines: greetings, thanks, what the model is."""
    questions, answers = rng.choice(FIXED)
    return rng.choice(questions), rng.choice(answers)


def dialogues(documents: list[Document], count: int, rng: random.Random) -> Iterator[list[Message]]:
    """`count` dialogues of one to five exchanges made from `documents`; a third have a system message."""
    by_kind: dict[str, list[Document]] = {"word": [], "entry": [], "topic": [], "passage": []}
    for document in documents:
        kinds = {"wordnet": ("word",), "jargon": ("entry",), "devil": ("entry",), "austen": ("passage",)}
        for kind in kinds.get(document.source, ("topic", "passage")):
            by_kind[kind].append(document)
    makers: dict[str, Callable[[Document, random.Random], Exchange | None]] = {
        "word": word_exchange, "entry": entry_exchange, "topic": topic_exchange, "passage": passage_exchange,
    }  # fmt: skip
    for _ in range(count):
        messages: list[Message] = []
        if rng.random() < 0.33:
            messages.append({"role": "system", "content": rng.choice(SYSTEM)})
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5))):
            kind = rng.choices(("word", "entry", "topic", "passage", "fixed"), (40, 8, 22, 22, 8))[0]
            exchange = fixed_exchange(rng) if kind == "fixed" else makers[kind](rng.choice(by_kind[kind]), rng)
            if exchange is not None:
                messages += [{"role": "user", "content": exchange[0]}, {"role": "assistant", "content": exchange[1]}]
        if messages and messages[-1]["role"] == "assistant":
            yield messages
