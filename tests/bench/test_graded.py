"""Pairs of texts of known likeness: where both stand, and what is read of manual pages."""

from bench import graded

ROFF = r""".\" a comment
.TH NAME 1 "a date"
.SH DESCRIPTION
The program \fBreads\fR its
.B \-\-input
file \(em and "writes"
.br
another.
.PP
A second paragraph."""


def text(section, page, i):
    return " ".join(f"{section}.{page}.{i}.{word}" for word in range(20))


def test_pairs_stand_where_their_grade_says():
    pages = {s: {p: [text(s, p, i) for i in range(3)] for p in "xy"} for s in "abc"}
    pages["a"]["x"].append("what many pages say")
    pages["b"]["y"].append("what many pages say")
    pages["d"] = {"empty": []}
    pairs, grades = graded.pairs(pages, 40)
    assert grades.tolist() == [3, 2, 1, 0] * 40
    for (first, second), grade in zip(pairs, grades.tolist(), strict=True):
        one, other = (each.split()[0].split(".") for each in (first, second))
        same = [a == b for a, b in zip(one[:3], other[:3], strict=True)]
        expected = {3: [True, True, True], 2: [True, True, False], 1: [True, False], 0: [False]}[grade]
        assert same[: len(expected)] == expected
        if grade == 3:
            assert f"{first} {second}" == text(*one[:3])
    assert graded.pairs(pages, 40)[0] == pairs


def test_paragraphs_of_a_manual_page():
    found = [" ".join(each.split()) for each in graded.paragraphs(ROFF)]
    expected = ["The program reads its --input file and writes another.", "A second paragraph."]
    assert [each for each in found if each] == expected
