"""Natural-looking text without facts that a question could be about: the hay around the needles.

Sentences of a fictitious works journal, drawn from patterns and word lists (words.toml); no number, no name.
"""

from __future__ import annotations

from random import Random

from eval.tasks.words import WORDS, Language


def paragraph(draw: Random, language: Language) -> str:
    """Three to six sentences."""
    glue = " " if language == "en" else ""
    return glue.join(sentence(draw, language) for _ in range(draw.randint(3, 6)))


def sentence(draw: Random, language: Language, about: str | None = None) -> str:
    """One sentence without any name or number.

    Args:
        about: what most of them then tell of, such as "the duck pond".
    """
    lists = WORDS[language]["carrier"]
    words = {name: draw.choice(choices) for name, choices in lists.items() if name != "patterns"}
    words["thing2"] = draw.choice([thing for thing in lists["thing"] if thing != words["thing"]])
    words["thing"] = about or words["thing"]
    words["did2"] = draw.choice([verb for verb in lists["did"] if verb != words["did"]])
    words |= {name.capitalize(): word[0].upper() + word[1:] for name, word in words.items()}
    text: str = draw.choice(lists["patterns"]).format(**words)
    # Full-width punctuation, as Chinese text has it.
    return text.replace(",", "，") if language == "zh" else text
