"""A verifiable reward: whether a text states a result, and whether its calculations are right."""

import math
import re

_NUMBER = r"\d+(?:\.\d+)?"
_EQUATION = re.compile(rf"(?<![\d.])({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*=\s*\$?({_NUMBER})(?![\d.]*\d)")
_DO = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
_RESULT = re.compile(r"####\s*-?\d")
LEAST_EQUATIONS = 2
"""Equations that a text lacks count as wrong."""
FOR_RESULT = 0.25
"""Reward for stating any result; the rest is for right equations."""


def equations(text: str) -> dict[str, bool]:
    """Returns each distinct `a + b = c` of a text (also with - * /), and whether it is right."""
    return {match[0]: _is_right(*match.groups()) for match in _EQUATION.finditer(text)}


def arithmetic_reward(text: str) -> float:
    """From 0 to 1: `FOR_RESULT` for a line `#### number`, the rest in proportion to the text's right equations."""
    found = equations(text).values()
    share = sum(found) / max(len(found), LEAST_EQUATIONS)
    return FOR_RESULT * bool(_RESULT.search(text)) + (1 - FOR_RESULT) * share


def _is_right(left: str, operator: str, right: str, result: str) -> bool:
    a, b = float(left), float(right)
    if operator == "/" and b == 0:
        return False
    return math.isclose(_DO[operator](a, b), float(result), rel_tol=0, abs_tol=0.005)
