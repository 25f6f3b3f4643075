"""When processes were last heard: the ones heard last are remembered."""

from sglang_hetero.transfer import heard
from sglang_hetero.transfer.heard import Heard


def test_the_last_word_counts_and_the_book_is_bounded(monkeypatch):
    monkeypatch.setattr(heard, "MAX_HEARD", 3)
    book = Heard()
    assert book.last("a") == float("-inf")
    for now, incarnation in enumerate("abcaad"):
        book.note(incarnation, float(now))
    assert [book.last(each) for each in "abcd"] == [4.0, float("-inf"), 2.0, 5.0]
