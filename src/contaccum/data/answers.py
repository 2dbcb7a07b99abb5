"""Whether a passage contains an answer, as DPR decides it.

String answers: passage and answer are NFD-normalised and cut into words (runs of letters, digits and marks; every other visible
character is a word of its own); each word is lower-cased; the answer's words must stand in the passage as one contiguous run.
Regex answers (CuratedTREC): the NFD-normalised pattern is searched in the NFD-normalised passage.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from contaccum.common.errors import DataError
from contaccum.data.readers.files import shown

SECONDS = 2.0  # for a regular expression in a passage, which takes microseconds; a few never end
ALL_SECONDS = 10.0  # for those of a question in all of its passages
MOST_COPIES = 10_000  # of a part that a pattern counts, as a{100} does: they are written out when it is compiled
MATCHES = ("string", "regex")
FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
WORD = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", flags=FLAGS)


def has_answer(answers: Sequence[str], text: str, match: str = "string") -> bool:
    """Whether `text` contains at least one of `answers`; equals DPR's `has_answer` for match "string" and "regex".

    As there, a string answer without any word (an empty one, say) is contained in every text, and an invalid pattern in none.
    """
    return AnswerMatcher(answers, match).found_in(searchable(text, match))


def searchable(text: str, match: str = "string") -> str:
    """The form of a passage that an `AnswerMatcher` searches; compute it once where one passage meets many questions.

    For "string" the words of the passage, lower-cased, each between single spaces; for "regex" the NFD-normalised passage.
    """
    normal = unicodedata.normalize("NFD", text)
    if check_match(match) == "regex":
        return normal
    return f" {' '.join(word.lower() for word in WORD.findall(normal))} "


def found_anywhere(answers: Iterable[str], match: str = "string") -> list[str]:
    """Those that a passage without a word holds too, and so every passage."""
    return [answer for answer in answers if AnswerMatcher([answer], match).found_in(searchable("\0", match))]


def found_nowhere(answers: Iterable[str], match: str = "string") -> list[str]:
    """Those that are no regular expressions, where they should be."""
    return [a for a in answers if check_match(match) == "regex" and _compiled(unicodedata.normalize("NFD", a)) is None]


class AnswerMatcher:
    """A question's answers, made ready once and looked up in many passages.

    `AnswerMatcher(answers, match).found_in(searchable(text, match))` equals `has_answer(answers, text, match)`.
    """

    def __init__(self, answers: Iterable[str], match: str = "string") -> None:
        self.left = ALL_SECONDS
        if check_match(match) == "regex":
            compiled = (_compiled(unicodedata.normalize("NFD", answer)) for answer in answers)
            self.patterns, self.runs = [pattern for pattern in compiled if pattern is not None], []
        else:
            # A word never holds a space, so a run of words between spaces is found as a substring. No words: two spaces become one,
            # which every searchable text holds.
            self.patterns, self.runs = [], [searchable(answer).replace("  ", " ") for answer in answers]

    def found_in(self, form: str) -> bool:
        """Whether the passage with this `searchable` form contains one of the answers."""
        return any(run in form for run in self.runs) or any(self._matches(pattern, form) for pattern in self.patterns)

    def _matches(self, pattern: Any, form: str) -> bool:
        began = time.perf_counter()
        try:
            return pattern.search(form, timeout=max(1e-3, min(SECONDS, self.left))) is not None
        except TimeoutError as error:
            answer, place, spent = shown(pattern.pattern), shown(form[:60]), "within" if self.left > SECONDS else "with others within"
            raise DataError(
                f"the answer {answer} was not looked up {spent} {SECONDS if spent == 'within' else ALL_SECONDS:g} s in the passage that "
                f"begins with {place}: its parts can match the same text in too many orders, as (a+)+ can; write it without repeats in "
                "repeats, or use --match string"
            ) from error
        except MemoryError as error:
            answer = shown(pattern.pattern)
            raise DataError(
                f"the answer {answer} needs more memory than there is, as (?R) does, which calls itself; write it without"
            ) from error
        finally:
            self.left -= time.perf_counter() - began


def check_match(match: str) -> str:
    """`match`, which is one of `MATCHES`."""
    if match not in MATCHES:
        raise ValueError(f"match={match!r} is unknown; choose one of {', '.join(MATCHES)}")
    return match


def _compiled(pattern: str) -> Any:
    """The pattern, or None where it is invalid. DPR's definition is that whatever cannot be compiled matches nothing, and `regex`
    raises more than its own error for malformed patterns, so every exception counts."""
    copies = math.prod(max(1, int(count)) for count in re.findall(r"\{(\d{1,9})", pattern))
    if copies > MOST_COPIES:
        raise DataError(f"the answer {shown(pattern)} asks for {copies:,} copies of its parts; count to {MOST_COPIES:,} at most")
    try:
        return regex.compile(pattern, flags=FLAGS)
    except Exception:
        return None
