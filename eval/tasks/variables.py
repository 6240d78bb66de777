"""Variable tracking: a value is handed from name to name, and the last name's value is asked for.

After RULER's variable tracking (Hsieh et al., 2024, arXiv:2404.06654, section 3.2).
"""

from __future__ import annotations

from random import Random

from eval.tasks.task import Planted, Question
from eval.tasks.words import Language, codes

_FIRST = {"en": "VAR {name} = {value}.", "zh": "变量 {name} = {value}。"}
_NEXT = {"en": "VAR {name} = VAR {before}.", "zh": "变量 {name} = 变量 {before}。"}
_ASK = {
    "en": "The variables are assigned in order. What number does VAR {name} hold?",
    "zh": "变量按顺序赋值。变量 {name} 的数值是多少?",
}
_LEAD = {"en": "VAR {name} = VAR", "zh": "变量 {name} = 变量"}
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def variables(draw: Random, language: Language, questions: int) -> Planted:
    """Chains of two assignments, all planted in one context; the question is about the end of each chain."""
    numbers = codes(draw, language, questions)
    names = draw.sample([a + b for a in _LETTERS for b in _LETTERS if a != b], 2 * questions)
    firsts = []
    seconds = []
    asked = []
    for number, value in enumerate(numbers):
        first, second = names[2 * number : 2 * number + 2]
        firsts.append(_FIRST[language].format(name=first, value=value))
        seconds.append(_NEXT[language].format(name=second, before=first))
        asked.append(
            Question(
                _ASK[language].format(name=second),
                (value,),
                _LEAD[language].format(name=second),
                max_tokens=32,
                at_once=False,
            )
        )
    draw.shuffle(firsts)
    draw.shuffle(seconds)
    return Planted(((*firsts, *seconds),), tuple(asked))
