"""A small reversible tokenizer: bytes for any text, and made-up words for all other ids.

Ids 0 to 2 are special (padding, start, end), 3 to 258 are the bytes, and every higher id is a word of consonant-vowel
syllables with a leading space. `encode` prefers words, so whatever `encode` makes of a text, `decode` gives back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

FIRST_BYTE_ID = 3
FIRST_WORD_ID = FIRST_BYTE_ID + 256
MIN_VOCAB_SIZE = FIRST_WORD_ID + 1
SPECIALS = (b"<pad>", b"<s>", b"</s>")

_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_WORD = re.compile(f" (?:[{_CONSONANTS}][{_VOWELS}])+".encode())


def _word(number: int) -> bytes:
    """Bijective base-80 numeral of a word id, in syllables."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, len(_SYLLABLES))
        text = _SYLLABLES[digit] + text
    return b" " + text.encode()


class Tokenizer:
    """Turns text into ids below `vocab_size` and back. Immutable, safe to share."""

    def __init__(self, vocab_size: int) -> None:
        words = [_word(number) for number in range(vocab_size - FIRST_WORD_ID)]
        self._pieces = [b"", b"", b"", *(bytes([value]) for value in range(256)), *words]
        self._with_specials = [*SPECIALS, *self._pieces[len(SPECIALS) :]]
        self._ids = {word: FIRST_WORD_ID + number for number, word in enumerate(words)}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; `decode` of them is the text again."""
        data = text.encode("utf-8", "replace")
        ids: list[int] = []
        position = 0
        for match in _WORD.finditer(data):
            if (word_id := self._ids.get(match.group())) is not None:
                ids += self._bytes(data[position : match.start()])
                ids.append(word_id)
                position = match.end()
        return ids + self._bytes(data[position:])

    @staticmethod
    def _bytes(data: bytes) -> list[int]:
        return [FIRST_BYTE_ID + value for value in data]

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """Returns one id's bytes; special ids are empty unless `special`, ids outside the vocabulary always are."""
        pieces = self._with_specials if special else self._pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    def pieces(self, ids: Iterable[int], *, special: bool = False) -> list[bytes]:
        """Returns the bytes of each id of the vocabulary."""
        pieces = self._with_specials if special else self._pieces
        return [pieces[token_id] for token_id in ids]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join([self.piece(token_id, special=special) for token_id in ids]).decode("utf-8", "replace")
