"""A reward that can be checked: whether a text comes to a result, and whether the sums on its way are right."""

import math
import re

_NUMBER = r"\d+(?:\.\d+)?"
_EQUATION = re.compile(rf"(?<![\d.])({_NUMBER})\s*([-+*/])\s*({_NUMBER})\s*=\s*\$?({_NUMBER})(?![\d.]*\d)")
_DO = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
_RESULT = re.compile(r"####\s*-?\d")
LEAST_EQUATIONS = 2
"""A text with fewer is marked as if the missing ones were wrong."""
FOR_RESULT = 0.25
"""What the result is worth, whatever it is; the rest is for the sums."""


def equations(text: str) -> dict[str, bool]:
    """Every `a + b = c` of a text (also with - * /), and whether it is right; each counts once."""
    return {match[0]: _is_right(*match.groups()) for match in _EQUATION.finditer(text)}


def arithmetic_reward(text: str) -> float:
    """From 0 to 1: `FOR_RESULT` for a line `#### number`, and the rest by the share of a text's sums that are right."""
    found = equations(text).values()
    share = sum(found) / max(len(found), LEAST_EQUATIONS)
    return FOR_RESULT * bool(_RESULT.search(text)) + (1 - FOR_RESULT) * share


def _is_right(left: str, operator: str, right: str, result: str) -> bool:
    a, b = float(left), float(right)
    if operator == "/" and b == 0:
        return False
    return math.isclose(_DO[operator](a, b), float(result), rel_tol=0, abs_tol=0.005)
