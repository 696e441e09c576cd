"""Verifiers that ship with Cauce: pure functions in the native signature, 1.0 for right and 0.0 for wrong.

`answer` is the column with the gold answers. A gold answer of None makes the verifier abstain; a gold answer
that cannot be read is an error and never a 0. Leaves out symbolic mathematics. None of them runs model
output.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_MAX_DIGITS = 60  # a longer run of digits is noise, and would make exact arithmetic slow
_NUMBER = re.compile(
    r"""(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?   # 1,234.5 or 1234.5
        (?:[eE][+-]?\d{1,3}(?![\w.]))?               # 1e-3
      | \.\d+                                        # .5""",
    re.VERBOSE,
)
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
_MINUS = str.maketrans({"\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2013": "-", "\ufe63": "-", "\uff0d": "-"})
_LATEX_SEPARATORS = re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")

Completions = Sequence[str | Sequence[dict[str, Any]]]


def last_number(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the last number of the answer equals the last number of the gold answer.

    Reads signs, thousands separators, currency, decimals and fractions: "72 clips, altogether." is 72,
    "$29.00" is 29, "- 3" is -3. Near miss: a right number followed by another one ("68, or 69") scores 0, and
    so does an answer that lists every candidate, unless the listing happens to stop at the right one.
    """
    golds = [None if gold is None else _gold_number(gold, "last_number") for gold in answer]
    return _compare(completions, golds, read_number)


def exact_match(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the answer is the gold text, spaces at the ends and runs of spaces aside.

    Near miss: other case, a full stop or any word beside the gold text scores 0.
    """
    golds = [None if gold is None else _plain(_nonempty(str(gold), "exact_match")) for gold in answer]
    return _compare(completions, golds, _plain)


def gsm8k(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the number after the last `####` equals the gold answer (raw GSM8K text or its number).

    Text after the number's line is allowed. Near miss: the right number without `####` scores 0.
    """
    golds = []
    for gold in answer:
        marked = None if gold is None else _after_hashes(str(gold))
        golds.append(None if gold is None else _gold_number(gold if marked is None else marked, "gsm8k"))
    return _compare(completions, golds, lambda text: _first_number(_after_hashes(text)))


def boxed(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the content of the last `\\boxed{}` equals the gold answer, as a number or else as text.

    Gold may itself hold a `\\boxed{}`. Near miss: the right value outside a box, or an equal expression in
    another form ("\\frac{1}{2}" for "0.5"), scores 0.
    """
    golds = []
    for gold in answer:
        inner = None if gold is None else _last_box(str(gold))
        golds.append(None if gold is None else _nonempty(_value(str(gold) if inner is None else inner), "boxed"))
    return _compare(completions, golds, lambda text: None if (box := _last_box(text)) is None else _value(box))


def read_number(text: str) -> Fraction | None:
    """The last number in a text, exactly, or None."""
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _compare(completions: Completions, golds: Sequence[Any], read: Any) -> list[float | None]:
    scores: list[float | None] = []
    for completion, gold in zip(completions, golds, strict=True):
        found = read(_text(completion))
        scores.append(None if gold is None else float(found is not None and found == gold))
    return scores


def _text(completion: str | Sequence[dict[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"] or "")


def _gold_number(gold: Any, verifier: str) -> Fraction:
    number = read_number(str(gold))
    if number is None:
        raise ValueError(f"{verifier}: no number in the gold answer {gold!r}; choose another column or verifier")
    return number


def _nonempty(gold: Any, verifier: str) -> Any:
    if isinstance(gold, str) and not gold.strip():
        raise ValueError(f"{verifier}: the gold answer is empty; choose another column or verifier")
    return gold


def _first_number(text: str | None) -> Fraction | None:
    numbers = _numbers(text or "")
    return numbers[0] if numbers else None


def _numbers(text: str) -> list[Fraction]:
    text = _LATEX_SEPARATORS.sub(",", text.translate(_MINUS).replace("\\$", "$"))
    numbers: list[Fraction] = []
    end = slash_end = -1
    for match in _NUMBER.finditer(text):
        value = _exact(match.group().replace(",", ""))
        if value is None:
            continue
        if slash_end == match.start() and value and numbers:
            numbers[-1] /= value  # 1/2; a second slash (a date) starts anew
            slash_end = -1
        else:
            numbers.append(-value if _is_negative(text, match.start()) else value)
            is_part = end >= 0 and text[end : match.start()] == "/"
            slash_end = match.end() + 1 if text[match.end() : match.end() + 1] == "/" and not is_part else -1
        end = match.end()
    return numbers


def _exact(digits: str) -> Fraction | None:
    return Fraction(digits) if len(digits) <= _MAX_DIGITS else None


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus sign belongs to the number at `start`; "10 - 3", "x-3" and a bullet "- 3" have none."""
    head = text[:start].rstrip(_CURRENCY)
    stripped = head.rstrip(" \t")
    if not stripped.endswith("-"):
        return False
    before = stripped[:-1]
    spaces = before[len(before.rstrip()) :]
    before = before.rstrip().rstrip(_CURRENCY)
    follows_value = before[-1:].isdigit() or before[-1:] in (")", "]", "%")
    if stripped == head:  # "-3"
        return "\n" in spaces or not (follows_value or (not spaces and before[-1:].isalpha()))
    if "\n" in spaces:
        return False  # "- 3" at the start of a line is a list item, unless the text starts with it
    # "the answer is - 3" has a sign and "x - 3" is a difference: a single letter counts as a variable.
    is_variable = re.search(r"(?<![^\W\d_])[^\W\d_]$", before) is not None
    return not (follows_value or is_variable)


def _after_hashes(text: str) -> str | None:
    found = _HASHES.findall(text)
    return found[-1] if found else None


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def _value(text: str) -> Fraction | str:
    """A lone number as a number ("$1,234" too), anything else as text without spaces."""
    stripped = re.sub(r"\\text\{([^{}]*)\}", r"\1", text.strip().strip("$").strip())
    if re.fullmatch(rf"[-+]?\s*[{_CURRENCY}]?\s*[\d,.{{}}!\\]+(?:\s*/\s*\d+)?", stripped.translate(_MINUS)):
        numbers = _numbers(stripped)
        if len(numbers) == 1:
            return numbers[0]
    return re.sub(r"\s+", "", stripped)


def _plain(text: str) -> str:
    return " ".join(text.split())
