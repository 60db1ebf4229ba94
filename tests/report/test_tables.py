"""How numbers are written, which rows of a table are folded, and sections as text."""

import pytest

from shardc.report.tables import Section, bytes_text, fold_leaves, fold_paths, report_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (1048575, "1.0 MiB"), (2**42, "4.0 TiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (1.26e-4, "126 us"), (1.234e-3, "1.23 ms"), (12.34, "12.3 s"), (5e-12, "0 s")]
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_only_the_numbers_that_differ_are_folded():
    assert fold_paths(["opt/0/mu/blocks_0/up", "opt/0/mu/blocks_11/up"]) == "opt/0/mu/blocks_*/up"
    assert fold_paths(["opt/0/mu"]) == "opt/0/mu"


def folded(*paths, key=()):
    return [text for _, text, _ in fold_leaves([(key, path, None) for path in paths])]


def test_words_that_differ_are_put_in_braces():
    paths = [f"opt/{m}/blocks_{i}/{w}" for m in ("mu", "nu") for i in (0, 1) for w in ("bias", "scale")]
    assert folded(*paths) == ["opt/{mu,nu}/blocks_*/{bias,scale}  x8"]
    assert folded("a/x", "b/x", "a") == ["a/x", "b/x", "a"]  # arguments are not folded
    assert folded("a/x/u", "a/y/u", "a/y/v") == ["a/x/u", "a/y/{u,v}  x2"]
    assert folded("a/a_very_long_word", "a/another_long_word") == ["a/a_very_long_word", "a/another_long_word"]
    unlike = [(("f32[4]",), "a/x", 1), (("f32[8]",), "a/y", 2), (("f32[4]",), "a/z", 3)]
    assert fold_leaves(unlike) == [(("f32[4]",), "a/{x,z}  x2", [1, 3]), (("f32[8]",), "a/y", [2])]


def test_a_section_is_its_title_with_lines_or_a_table_below():
    table = Section("Moves", ("kind", ">bytes"), [("permute", "8"), ("all_reduce", "128")])
    assert str(table) == (
        "Moves\n  kind         bytes\n  ──────────────────\n  permute          8\n  all_reduce     128"
    )
    assert str(Section("Moves: none", table.columns)) == "Moves: none"
    assert str(Section("", table.columns, table.rows)) == str(table).partition("\n")[2]
    assert str(Section("Part", lines=["one", "two"], depth=1)) == "  Part\n    one\n    two"
    assert report_text([Section("a"), None, Section("b")]) == "a\n\nb"


def test_cells_are_folded_into_a_width():
    rows = [(f"params/transformer/blocks_{i}/attention", "f32[512,3,8,64]", "pinned", "8.0 MiB") for i in "abc"]
    table = Section("Arguments", ("path", "type", "why", ">bytes per device"), rows)
    assert str(table) == table.text(100)
    lines = table.text(48).splitlines()
    assert max(map(len, lines)) == 48
    assert [line.split()[1:] for line in lines if "pinned" in line] == [["f32[512,3,8,64]", "pinned", "8.0", "MiB"]] * 3
    cells = [line.split()[0] for line in lines[-12:]]
    assert cells == [word for i in "abc" for word in ("params/", "transformer/", f"blocks_{i}/", "attention")]


def test_a_word_without_marks_is_cut_anywhere_and_a_table_that_cannot_fit_is_lines():
    table = Section("Found", ("path", "what"), [("w" * 70, "all_reduce"), ("v", "permute")])
    lines = table.text(40).splitlines()
    assert max(map(len, lines)) <= 40 and "".join(lines).count("w") == 70 + 1 and "path: " not in str(lines)
    wide = Section("Found", [f"column {i}" for i in range(9)], [["word"] * 9])
    assert wide.text(40).splitlines()[1].startswith("  column 0: word; column 1: word;")
