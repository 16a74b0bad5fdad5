"""Text that streams is the text of all tokens at once, and ends where a stop string is complete."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opgraft.serving.detokenizer import MOST_HELD, Detokenizer
from opgraft.serving.stop_strings import StopStrings
from opgraft.serving.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "Hello wörld, this is a 漢字 test 🎉 of streaming.",
    "  two spaces\n\nand lines\t👩‍👩‍👧‍👦 ZWJ é́",
    "<|im_start|>user\nשלם<|im_end|>\n",
    "",
]


def streamed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Read the text after each token and at the end; return what each time has added."""
    texts = [detokenizer.text]
    for token in ids:
        detokenizer.add(token)
        texts.append(detokenizer.text)
    detokenizer.finish()
    texts.append(detokenizer.text)
    assert all(map(str.startswith, texts[1:], texts))
    return [text[len(before) :] for before, text in pairwise(texts)]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_text_of_several_scripts(smollm2: Tokenizer, text: str, skip: bool) -> None:
    """No piece but the last ends within a character, and all of them are the text."""
    detokenizer = Detokenizer(smollm2, skip_special_tokens=skip)
    ids = smollm2.encode(text)
    pieces = streamed(detokenizer, ids)
    assert "".join(pieces) == detokenizer.text == smollm2.decode(ids, skip_special_tokens=skip)
    assert not any("\ufffd" in piece for piece in pieces)


def test_random_tokens(smollm2: Tokenizer) -> None:
    """Random tokens, single bytes that are no characters among them, stream into the text of all at once.

    It is the same text where nobody reads it before the end.
    """
    pick = random.Random(0)  # noqa: S311  # no secret
    for _ in range(500):
        bytes_mostly = [pick.randrange(120, 260) for _ in range(pick.randrange(60))]
        ids = [
            token if pick.random() < 0.7 else pick.randrange(smollm2.vocab_size)
            for token in bytes_mostly
        ]
        skip = pick.random() < 0.5
        detokenizer = Detokenizer(smollm2, skip_special_tokens=skip)
        assert "".join(streamed(detokenizer, ids)) == smollm2.decode(ids, skip_special_tokens=skip)
        unread = Detokenizer(smollm2, skip_special_tokens=skip)
        for token in ids:
            unread.add(token)
        unread.finish()
        assert unread.text == detokenizer.text


def test_the_cost_of_a_token_is_constant(smollm2: Tokenizer) -> None:
    """However many bytes make no character, few tokens are held back and looked at."""
    token = smollm2.backend.token_to_id("Ã")
    detokenizer = Detokenizer(smollm2)
    for count in range(500):
        detokenizer.add(token)
        assert len(detokenizer.text) + MOST_HELD > count
    detokenizer.finish()
    assert detokenizer.text == "\ufffd" * 500


def test_many_requests_at_once(smollm2: Tokenizer) -> None:
    """Streams do not see each other's tokens."""
    ids = [smollm2.encode(text) for text in TEXTS]
    streams = [Detokenizer(smollm2, skip_special_tokens=False) for _ in TEXTS]
    for step in range(max(map(len, ids))):
        for stream, tokens in zip(streams, ids, strict=True):
            if step < len(tokens):
                stream.add(tokens[step])
    for stream in streams:
        stream.finish()
    assert [stream.text for stream in streams] == TEXTS


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    """A tokenizer as of Llama 2: words begin with a mark, and characters without a token are spelled in bytes."""
    words = ["▁", "▁the", "▁cat", "s", "a", "b", "c", "t", "h", "e", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = tokenizers.models.BPE(
        {token: index for index, token in enumerate(tokens)},
        [],
        unk_token="<unk>",  # noqa: S106  # no secret
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    parts = tokenizers.decoders
    backend.decoder = parts.Sequence(
        [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return Tokenizer(tmp_path_factory.mktemp("sentencepiece"), backend)


def spelled(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


def test_words_that_begin_with_a_mark(sentencepiece: Tokenizer) -> None:
    """The space before a word is there where the word continues a prompt, and not where it begins a text."""
    ids = spelled(sentencepiece, "▁the", "▁cat", "s", "<0xE6>", "<0xBC>", "<0xA2>", "▁the")
    assert (
        "".join(streamed(Detokenizer(sentencepiece), ids))
        == "the cats漢 the"
        == sentencepiece.decode(ids)
    )
    after = Detokenizer(
        sentencepiece, spelled(sentencepiece, "<s>", "▁the", "▁cat", "▁the", "▁cat")
    )
    assert "".join(streamed(after, ids)) == " the cats漢 the"


def test_bytes_that_end_the_text(sentencepiece: Tokenizer) -> None:
    """A character that is never whole is shown as broken at the end."""
    ids = spelled(sentencepiece, "▁the", "<0xE6>", "<0xBC>")
    detokenizer = Detokenizer(sentencepiece)
    assert streamed(detokenizer, ids) == ["the", "", "", "\ufffd\ufffd"]
    assert detokenizer.text == sentencepiece.decode(ids)


def test_bytes_that_spoil_those_before(sentencepiece: Tokenizer) -> None:
    """Text that was shown stays, although the library, asked for all bytes at once, finds them all broken."""
    ids = spelled(sentencepiece, "▁the", "<0xE6>", "<0xBC>", "<0xA2>", *["<0x80>"] * 40, "▁cat")
    pieces = streamed(Detokenizer(sentencepiece), ids)
    assert pieces[3] == "漢"
    assert "".join(pieces).startswith("the漢")
    assert "".join(pieces).endswith("\ufffd cat")


def naive(text: str, stop: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """Search after every character."""
    for end in range(len(text) + 1):
        for found in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(found):
                return text[: end if include else end - len(found)], found
    return text, None


LETTERS = st.text("ab漢", max_size=40)
STOPS = st.lists(st.text("ab漢", min_size=1, max_size=5), max_size=4)


@given(LETTERS, STOPS, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=500)
def test_stop_strings_in_pieces(
    text: str, stop: list[str], include: bool, pick: random.Random
) -> None:
    """Text in pieces of any size ends where a search after every character ends it, and nothing is shown twice."""
    search, shown, place = StopStrings(stop, include=include), "", 0
    while place < len(text):
        size = pick.randrange(1, 6)
        shown += search.add(text[place : place + size])
        place += size
        whole, _ = naive(text[:place], stop, include=include)
        assert whole.startswith(shown)
        assert search.found or len(text[:place]) - len(shown) < max([1, *map(len, stop)]), (
            "no more is held than needed"
        )
    shown += search.rest()
    assert (shown, search.found) == naive(text, stop, include=include)
    assert search.add("more") == "" or search.found is None


@given(
    st.lists(st.sampled_from([*range(36, 120), 142, 1, 2]), max_size=30),
    STOPS,
    st.booleans(),
    st.data(),
)
@settings(max_examples=200)
def test_stop_strings_across_tokens(
    smollm2: Tokenizer, ids: list[int], stop: list[str], include: bool, data
) -> None:
    """The text and the number of tokens are those of decoding all tokens and searching anew after each."""
    text = smollm2.decode(ids)
    if text and data.draw(st.booleans()):  # a stop string that occurs
        begin = data.draw(st.integers(0, len(text) - 1))
        stop = [*stop, text[begin : begin + data.draw(st.integers(1, 6))]]
    detokenizer = Detokenizer(smollm2, stop=stop, include_stop_str_in_output=include)
    count = 0
    for token in ids:
        count += 1
        detokenizer.add(token)
        if detokenizer.stop_reason:
            break
    detokenizer.finish()
    assert (detokenizer.text, detokenizer.stop_reason) == naive(text, stop, include=include)
    assert count == naive_count(smollm2, ids, stop)


def naive_count(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> int:
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        if not text.endswith("\ufffd") and any(found in text for found in stop):
            return count
    return len(ids)


def test_the_first_tokens_do_not_stop(smollm2: Tokenizer) -> None:
    """Stop strings count after min_tokens tokens."""
    ids = smollm2.encode("one two one two")
    detokenizer = Detokenizer(smollm2, stop=["one"], min_tokens=1)
    assert "".join(streamed(detokenizer, ids)) == "one two "
    assert detokenizer.stop_reason == "one"
