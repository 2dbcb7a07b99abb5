"""Answer matching equals DPR's, by a second implementation that looks at one character after the other."""

from __future__ import annotations

import random
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contaccum.data.answers import AnswerMatcher, has_answer, searchable


def scanned_words(text: str) -> list[str]:
    """Lower-cased words by Unicode category alone: letters, numbers and marks run together, separators and controls part them."""
    words: list[str] = []
    inside = False
    for character in unicodedata.normalize("NFD", text):
        kind = unicodedata.category(character)[0]
        if kind in "LNM" and inside:
            words[-1] += character
        elif kind not in "ZC":
            words.append(character)
        inside = kind in "LNM"
    return [word.lower() for word in words]


def scanned_has_answer(answers: list[str], text: str) -> bool:
    words = scanned_words(text)
    wanted = [scanned_words(answer) for answer in answers]
    return any(words[i : i + len(run)] == run for run in wanted for i in range(len(words) - len(run) + 1))


def searched_has_answer(patterns: list[str], text: str) -> bool:
    """By Python's own `re`, whose syntax the patterns here keep to."""
    for pattern in patterns:
        try:
            compiled = re.compile(unicodedata.normalize("NFD", pattern), flags=re.IGNORECASE | re.MULTILINE)
        except re.error:
            continue
        if compiled.search(unicodedata.normalize("NFD", text)):
            return True
    return False


NFC, NFD = "Café Müller, São Paulo", unicodedata.normalize("NFD", "Café Müller, São Paulo")
STRING_CASES = [
    # casing and words
    (["Paris"], "paris is a city", True),
    (["paris"], "parisian", False),
    (["Paris Texas"], "Paris, Texas", False),
    (["Paris, Texas"], "Paris , Texas", True),
    (["a b c"], "a b a b c", True),
    (["the the"], "the", False),
    # several answers, none, empty ones
    (["x", "y"], "only y here", True),
    ([], "anything", False),
    ([""], "anything", True),
    ([""], "", True),
    ([" \t\n"], "anything", True),
    (["x", ""], "nothing", True),
    # punctuation: each sign is a word
    (["U.S."], "the U.S. army", True),
    (["U.S."], "the U.S army", False),
    (["rock'n'roll"], "rock’n’roll", False),
    (["C++"], "in C+ code", False),
    (["C+"], "in C++ code", True),
    (["well-known"], "a well - known man", True),
    (["snake"], "snake_case", True),
    (["$5"], "it costs $ 5", True),
    (["100"], "100€", True),
    ([".*"], "anything at all", False),
    ([".*"], "the pattern .* matches", True),
    # numbers
    (["1,000"], "about 1,000 men", True),
    (["1,000"], "about 1000 men", False),
    (["000"], "about 1,000 men", True),
    (["3.5"], "is 3 . 5 metres", True),
    (["3.5"], "is 3.55 metres", False),
    (["1984"], "in 1984-85", True),
    (["1980"], "the 1980s", False),
    (["1/2"], "½ cup", False),
    (["m²"], "10 m²", True),
    (["m2"], "10 m²", False),
    (["Ⅳ"], "Chapter ⅳ", True),
    (["٣"], "٣ books", True),
    # diacritics, composed and decomposed
    (["café"], "Un CAFÉ noir", True),
    ([NFC], NFD, True),
    (["café"], "cafe", False),
    (["Sao Paulo"], "São Paulo", False),
    (["Müller"], "MÜLLER", True),
    (["Å"], "\u212b", True),
    (["naïve"], "nai\u0308\u0308ve", False),
    (["ệ"], "e\u0323\u0302", True),
    (["straße"], "STRASSE", False),
    (["ẞ"], "ß", True),
    (["istanbul"], "İstanbul", False),
    (["ﬁ"], "fi", False),
    (["ΣΑΣ"], "σας", True),
    (["Йод"], "и\u0306од", True),
    # no spaces, other scripts
    (["东京"], "在东京都", False),
    (["东京"], "在 东京 都", True),
    (["が"], "か\u3099", True),
    (["한국"], unicodedata.normalize("NFD", "한국"), True),
    (["हिन्द"], "हिन्दी", False),
    (["😀😀"], "so 😀 😀", True),
    (["👍"], "👍🏽", True),
    # separators and controls
    (["a b"], "a\u00a0b", True),
    (["a b"], "a\u3000b", True),
    (["a b"], "a\x00b", True),
    (["a b"], "a\u200bb", True),
    (["ab"], "a\u00adb", False),
    (["a b"], "a\u2028b", True),
]
REGEX_CASES = [
    (["Paris|London"], "in london", True),
    (["^Lon"], "Paris\nLondon", True),
    (["don$"], "London\nParis", True),
    (["don$"], "London Paris", False),
    (["19[0-9]{2}"], "in 1984", True),
    (["19[0-9]{2}"], "in 2084", False),
    (["aris"], "PARIS", True),
    ([r"\bParis\b"], "Parisian", False),
    ([r"\d+ ?(km|miles)"], "about 300km", True),
    ([r"\d+,\d+"], "1,000", True),
    (["(unclosed"], "(unclosed", False),
    (["[z-a]"], "z-a", False),
    (["*"], "*", False),
    (["(?P<n"], "(?P<n", False),
    (["(", "ok"], "ok", True),
    (["(", "[", "*"], "( [ *", False),
    ([""], "anything", True),
    ([], "anything", False),
    (["café"], "cafe\u0301", True),
    (["cafe\u0301"], "CAFÉ", True),
    (["cafe"], "café", True),
    (["é$"], "cafe\u0301", True),
    (["Mu.ller"], "Müller", True),
    (["a.b"], "a\nb", False),
    (["Bei?jing|Peking"], "北京 (Peking)", True),
    (["北京"], "在北京市", True),
    ([r"\$5"], "costs $5", True),
    ([r"U\.?S\.?"], "the US", True),
]


@pytest.mark.parametrize(("answers", "text", "expected"), STRING_CASES)
def test_string_answers(answers: list[str], text: str, expected: bool) -> None:
    assert scanned_has_answer(answers, text) is expected
    assert has_answer(answers, text) is expected


@pytest.mark.parametrize(("answers", "text", "expected"), REGEX_CASES)
def test_regex_answers(answers: list[str], text: str, expected: bool) -> None:
    assert searched_has_answer(answers, text) is expected
    assert has_answer(answers, text, "regex") is expected


# Pieces that meet each other at every kind of border.
PIECES = ["Paris", "paris", "é", "e\u0301", "É", "1,000", "3.5", "1", "000", "'s", "U.S.", "-", "–", " ", "  ", "\n", "\u00a0", "东京"]
PIECES += ["İ", "ﬁ", "\u0301", "😀", "\u200d", "(", ")", ".", "ς", "Σ", "한", "\u1112\u1161\u11ab", "½", "x", "\t", "\u00ad", "_", "’", "ß"]


def generated_cases(count: int, seed: int) -> list[tuple[list[str], str]]:
    generator = random.Random(seed)

    def text(most: int) -> str:
        return "".join(generator.choices(PIECES, k=generator.randint(1, most)))

    return [([text(3) for _ in range(generator.randint(1, 2))], text(25)) for _ in range(count)]


def test_generated_string_cases_equal_the_scan() -> None:
    cases = generated_cases(2000, seed=0)
    found = [scanned_has_answer(answers, text) for answers, text in cases]
    assert 400 < sum(found) < 1600  # neither answer is the usual one
    assert [has_answer(answers, text) for answers, text in cases] == found


def test_generated_regex_cases_equal_python_re() -> None:
    generator = random.Random(1)
    signs = ["a", "b", "é", ".", "*", "(", ")", "|", "[ab]", "^", "$", "\\d", "?"]
    cases = [("".join(generator.choices(signs, k=generator.randint(1, 5))), "".join(generator.choices("abé1\n", k=6))) for _ in range(500)]
    # The two libraries disagree on what cannot be repeated (possessive quantifiers, repeated anchors).
    cases = [(pattern, text) for pattern, text in cases if not re.search(r"[*?(|^$][*?]|^[*?]", pattern)]
    found = [searched_has_answer([pattern], text) for pattern, text in cases]
    assert len(cases) > 200
    assert 50 < sum(found) < len(cases) - 50
    assert [has_answer([pattern], text, "regex") for pattern, text in cases] == found


def test_every_character_is_the_same_kind_of_word() -> None:
    assigned = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    text = " ".join(f"a{character}b" for character in assigned)
    assert searchable(text).split() == scanned_words(text)


@given(st.text(st.characters(exclude_categories=("Cn", "Cs"))), st.text(st.characters(exclude_categories=("Cn", "Cs")), max_size=4))
def test_any_text_equals_the_scan(text: str, answer: str) -> None:
    assert has_answer([answer], text) is scanned_has_answer([answer], text)


@given(st.text(st.sampled_from("aé1,. -東\n"), min_size=1), st.data())
def test_a_run_of_a_texts_words_is_found_in_it(text: str, data: st.DataObject) -> None:
    words = scanned_words(text)
    start = data.draw(st.integers(0, len(words)))
    end = data.draw(st.integers(start, len(words)))
    assert has_answer([" ".join(words[start:end]).upper()], text)


@pytest.mark.parametrize("match", ["string", "regex"])
def test_one_matcher_serves_many_passages(match: str) -> None:
    matcher = AnswerMatcher(["paris", "3.5"], match)
    passages = ["Paris", "no", "3.5 m", "parisian", ""]
    assert [matcher.found_in(searchable(text, match)) for text in passages] == [
        has_answer(["paris", "3.5"], text, match) for text in passages
    ]


def test_unknown_match_is_refused() -> None:
    with pytest.raises(ValueError, match="match='exact' is unknown; choose one of string, regex"):
        has_answer(["x"], "x", "exact")
