"""A mask from outside the tree, as a user writes it in one file."""

CHUNKED = '''
"""Chunked causal attention: a row sees the keys of its own chunk, up to itself."""

from dataclasses import dataclass
from typing import ClassVar

from references.masks import Atom


@dataclass(frozen=True)
class Chunked(Atom):
    """k <= q + offset and k // size == (q + offset) // size."""

    size: int
    kind: ClassVar[str] = "chunked"
    words: ClassVar[tuple[str, ...]] = ("chunked", "chunked.square")
    varies: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self):
        return f"chunked.{self.size}"

    @classmethod
    def parse(cls, fields):
        (size,) = fields
        return cls(int(size))

    def mod(self, seqlen_q, seqlen_kv, device="cpu"):
        def mod(b, h, q, k):
            at = q + (seqlen_kv - seqlen_q)
            return (k <= at) & (k // self.size == at // self.size)

        return mod

    def interval(self, seqlen_q, seqlen_kv, b, q):
        at = q + (seqlen_kv - seqlen_q)
        return at // self.size * self.size, at + 1

    @classmethod
    def draw(cls, choose, word, batch, seqlen_q, seqlen_kv):
        return cls(choose.one_of((2, 16, 17)))

    @classmethod
    def can_empty_rows(cls, word, *, square):
        return not square

    @classmethod
    def gallery(cls):
        return (cls(5),)

    def sibling(self, seqlen_q, seqlen_kv):
        return Chunked(self.size // 2 or 2)

    def restrict(self, view):
        yield self

    def doubled(self, *, rows):
        return Chunked(2 * self.size)
'''
