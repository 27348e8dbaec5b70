"""A pickle of plain values, read without running any of it.

`pickle.Unpickler` imports and calls what a file names, and one that refuses names can still be made to ask for
gigabytes by a file of ten bytes. This reader knows the opcodes for numbers, text, lists, tuples and dicts with
text as keys; it refuses all others, and makes at most one object per byte.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

_NEWEST_PROTOCOL = 5
_LONGEST_NAME = 60  # of what a file wanted to call, in an error
_MOST_DIGITS = 100
_GET = re.compile(rb"h.|j....", re.DOTALL)  # BINGET, LONG_BINGET
_GETS = re.compile(rb"(?:h.|j....)+", re.DOTALL)  # the frames of a stack


class NotPlain(ValueError):
    """The data are cut, damaged, or hold more than plain values; `offset` is the byte where that shows."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"at byte {offset}: {reason}")
        self.offset = offset


def load_plain(data: bytes) -> Any:
    """The value that `data` holds; what follows its end is left alone.

    Values may be shared, and lists and dicts may hold themselves: whoever walks them must bound the walk.

    Raises:
        NotPlain: no pickle of plain values.
    """
    return _Reader(data).read()


class _Got(dict[bytes, Any]):
    """What the opcodes BINGET and LONG_BINGET, with their argument, push."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo

    def __missing__(self, get: bytes) -> Any:
        value = self[get] = self._memo[int.from_bytes(get[1:], "little")]
        return value


class _Reader:
    """A stack machine. Each opcode's method takes the offset behind the opcode and returns that of the next."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._got = _Got(self._memo)
        self._at = 0

    def read(self) -> Any:
        data, size, known = self._data, len(self._data), _OPCODES
        at = 0
        try:
            while at < size:
                self._at, code = at, data[at]
                if code == _STOP:
                    return self._stack.pop()
                read = known.get(code)
                if read is None:
                    raise NotPlain(at, _refusal(code))
                at = read(self, at + 1)
        except NotPlain:
            raise
        except (IndexError, KeyError) as error:
            raise NotPlain(self._at, "it refers to a value that is not there; the data are damaged") from error
        except (ValueError, struct.error) as error:
            raise NotPlain(self._at, f"a value cannot be read ({error}); the data are damaged") from error
        raise NotPlain(size, "the data end in the middle; the file was cut short")

    def _take(self, at: int, count: int) -> bytes:
        taken = self._data[at : at + count]
        if len(taken) < count:
            raise NotPlain(len(self._data), "the data end in the middle; the file was cut short")
        return taken

    def _line(self, at: int) -> bytes:
        """A text argument, without its newline."""
        end = self._data.find(b"\n", at)
        if end < 0:
            raise NotPlain(len(self._data), "the data end in the middle; the file was cut short")
        return self._data[at:end]

    # -- values -----------------------------------------------------------------------------------

    def _none(self, at: int) -> int:
        self._stack.append(None)
        return at

    def _true(self, at: int) -> int:
        self._stack.append(True)
        return at

    def _false(self, at: int) -> int:
        self._stack.append(False)
        return at

    def _int1(self, at: int) -> int:
        self._stack.append(self._data[at])
        return at + 1

    def _int2(self, at: int) -> int:
        self._stack.append(int.from_bytes(self._take(at, 2), "little"))
        return at + 2

    def _int4(self, at: int) -> int:
        self._stack.append(int.from_bytes(self._take(at, 4), "little", signed=True))
        return at + 4

    def _long1(self, at: int) -> int:
        return self._long(at + 1, self._data[at])

    def _long4(self, at: int) -> int:
        return self._long(at + 4, int.from_bytes(self._take(at, 4), "little"))

    def _long(self, at: int, count: int) -> int:
        self._stack.append(int.from_bytes(self._take(at, count), "little", signed=True))
        return at + count

    def _int_line(self, at: int) -> int:
        line = self._line(at)
        self._stack.append(line == b"01" if line in (b"00", b"01") else _number(line))  # protocol 0's False and True
        return at + len(line) + 1

    def _long_line(self, at: int) -> int:
        line = self._line(at)
        self._stack.append(_number(line.removesuffix(b"L")))
        return at + len(line) + 1

    def _float(self, at: int) -> int:
        self._stack.append(struct.unpack(">d", self._take(at, 8))[0])
        return at + 8

    def _float_line(self, at: int) -> int:
        line = self._line(at)
        self._stack.append(float(line))
        return at + len(line) + 1

    def _text1(self, at: int) -> int:
        return self._text(at + 1, self._data[at])

    def _text4(self, at: int) -> int:
        return self._text(at + 4, int.from_bytes(self._take(at, 4), "little"))

    def _text8(self, at: int) -> int:
        return self._text(at + 8, int.from_bytes(self._take(at, 8), "little"))

    def _text(self, at: int, count: int) -> int:
        self._stack.append(self._take(at, count).decode("utf-8", "surrogatepass"))
        return at + count

    def _text_line(self, at: int) -> int:
        line = self._line(at)
        self._stack.append(line.decode("raw_unicode_escape"))
        return at + len(line) + 1

    # -- containers -------------------------------------------------------------------------------

    def _empty_list(self, at: int) -> int:
        self._stack.append([])
        return at

    def _empty_dict(self, at: int) -> int:
        self._stack.append({})
        return at

    def _empty_tuple(self, at: int) -> int:
        self._stack.append(())
        return at

    def _mark(self, at: int) -> int:
        self._below_marks.append(self._stack)
        self._stack = []
        return at

    def _above_mark(self) -> list[Any]:
        above, self._stack = self._stack, self._below_marks.pop()
        return above

    def _list(self, at: int) -> int:
        above = self._above_mark()
        self._stack.append(above)
        return at

    def _tuple(self, at: int) -> int:
        above = self._above_mark()
        self._stack.append(tuple(above))
        return at

    def _dict(self, at: int) -> int:
        above = self._above_mark()
        self._stack.append({})
        self._put_items(above)
        return at

    def _tuple1(self, at: int) -> int:
        self._stack[-1] = (self._stack[-1],)
        return at

    def _tuple2(self, at: int) -> int:
        second, first = self._stack.pop(), self._stack.pop()
        self._stack.append((first, second))
        return at

    def _tuple3(self, at: int) -> int:
        third, second, first = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append((first, second, third))
        return at

    def _append(self, at: int) -> int:
        item = self._stack.pop()
        self._last_list().append(item)
        return at

    def _appends(self, at: int) -> int:
        above = self._above_mark()
        self._last_list().extend(above)
        return at

    def _last_list(self) -> list[Any]:
        last: Any = self._stack[-1]
        if type(last) is not list:
            raise NotPlain(self._at, "it appends to what is no list; the data are damaged")
        return last

    def _set_item(self, at: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        self._put_items([key, value])
        return at

    def _set_items(self, at: int) -> int:
        above = self._above_mark()
        self._put_items(above)
        return at

    def _put_items(self, items: list[Any]) -> None:
        """Keys that are no text are refused: numbers can be chosen so that all fall into one place of the dict."""
        last = self._stack[-1]
        if type(last) is not dict or len(items) % 2:
            raise NotPlain(self._at, "it sets items of what is no dict; the data are damaged")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise NotPlain(self._at, f"a dict has a {type(key).__name__} as key, which no snapshot has")
            last[key] = value

    # -- the memo and the stack itself ------------------------------------------------------------

    def _memoize(self, at: int) -> int:
        self._put(len(self._memo))
        return at

    def _put1(self, at: int) -> int:
        self._put(self._data[at])
        return at + 1

    def _put4(self, at: int) -> int:
        self._put(int.from_bytes(self._take(at, 4), "little"))
        return at + 4

    def _put_line(self, at: int) -> int:
        line = self._line(at)
        self._put(_number(line))
        return at + len(line) + 1

    def _put(self, index: int) -> None:
        if not 0 <= index <= len(self._data):  # a pickler counts them from 0 on
            raise NotPlain(self._at, "it numbers a value higher than there can be values; the data are damaged")
        if index in self._memo:
            self._got.clear()
        self._memo[index] = self._stack[-1]

    def _gets(self, at: int) -> int:
        """All the BINGET and LONG_BINGET in a row at once: they are nine tenths of a snapshot."""
        match = _GETS.match(self._data, at - 1)
        if match is None:
            raise NotPlain(len(self._data), "the data end in the middle; the file was cut short")
        self._stack.extend(map(self._got.__getitem__, _GET.findall(match[0])))
        return match.end()

    def _get1(self, at: int) -> int:
        if self._data[at + 1] in b"hj":
            return self._gets(at)
        self._stack.append(self._memo[self._data[at]])
        return at + 1

    def _get_line(self, at: int) -> int:
        line = self._line(at)
        self._stack.append(self._memo[_number(line)])
        return at + len(line) + 1

    def _pop(self, at: int) -> int:
        if self._stack:
            self._stack.pop()
        else:
            self._above_mark()
        return at

    def _pop_mark(self, at: int) -> int:
        self._above_mark()
        return at

    def _dup(self, at: int) -> int:
        self._stack.append(self._stack[-1])
        return at

    def _frame(self, at: int) -> int:
        self._take(at, 8)  # the length of what follows, of use only to who reads in pieces
        return at + 8

    def _protocol(self, at: int) -> int:
        if self._data[at] > _NEWEST_PROTOCOL:
            raise NotPlain(at, f"pickle protocol {self._data[at]} is not known (the newest is {_NEWEST_PROTOCOL})")
        return at + 1

    # -- what is refused --------------------------------------------------------------------------

    def _global(self, at: int) -> int:
        module = self._line(at)
        name = self._line(at + len(module) + 1)
        raise NotPlain(at - 1, _wants(b".".join((module, name)).decode("utf-8", "replace")))

    def _stack_global(self, at: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        texts = [part[:_LONGEST_NAME] if type(part) is str else "?" for part in (module, name)]
        raise NotPlain(at - 1, _wants(".".join(texts)))


def _number(line: bytes) -> int:
    if len(line) > _MOST_DIGITS:  # reading takes time with the square of the digits
        raise ValueError(f"a number of {len(line)} digits")
    return int(line)


def _wants(name: str) -> str:
    shown = "".join(char if char.isprintable() and char.isascii() else "?" for char in name[:_LONGEST_NAME])
    return f"it wants to call {shown}, and a snapshot calls nothing: refused, none of it was run"


def _refusal(code: int) -> str:
    if code in _REFUSED:
        return f"it holds {_REFUSED[code]}, which no snapshot has: refused, none of it was run"
    return f"0x{code:02x} is no opcode of a pickle; the data are damaged"


_STOP = ord(".")
_OPCODES: dict[int, Callable[[_Reader, int], int]] = {
    ord("N"): _Reader._none,
    0x88: _Reader._true,
    0x89: _Reader._false,
    ord("K"): _Reader._int1,
    ord("M"): _Reader._int2,
    ord("J"): _Reader._int4,
    0x8A: _Reader._long1,
    0x8B: _Reader._long4,
    ord("I"): _Reader._int_line,
    ord("L"): _Reader._long_line,
    ord("G"): _Reader._float,
    ord("F"): _Reader._float_line,
    0x8C: _Reader._text1,
    ord("X"): _Reader._text4,
    0x8D: _Reader._text8,
    ord("V"): _Reader._text_line,
    ord("]"): _Reader._empty_list,
    ord("}"): _Reader._empty_dict,
    ord(")"): _Reader._empty_tuple,
    ord("("): _Reader._mark,
    ord("l"): _Reader._list,
    ord("t"): _Reader._tuple,
    ord("d"): _Reader._dict,
    0x85: _Reader._tuple1,
    0x86: _Reader._tuple2,
    0x87: _Reader._tuple3,
    ord("a"): _Reader._append,
    ord("e"): _Reader._appends,
    ord("s"): _Reader._set_item,
    ord("u"): _Reader._set_items,
    0x94: _Reader._memoize,
    ord("q"): _Reader._put1,
    ord("r"): _Reader._put4,
    ord("p"): _Reader._put_line,
    ord("h"): _Reader._get1,
    ord("j"): _Reader._gets,
    ord("g"): _Reader._get_line,
    ord("0"): _Reader._pop,
    ord("1"): _Reader._pop_mark,
    ord("2"): _Reader._dup,
    0x95: _Reader._frame,
    0x80: _Reader._protocol,
    ord("c"): _Reader._global,
    ord("i"): _Reader._global,
    0x93: _Reader._stack_global,
}
_REFUSED = {
    ord("R"): "a call",
    ord("o"): "a call",
    ord("b"): "a call",
    0x81: "a call",
    0x92: "a call",
    ord("P"): "a persistent id",
    ord("Q"): "a persistent id",
    0x82: "an extension code",
    0x83: "an extension code",
    0x84: "an extension code",
    0x8F: "a set",
    0x90: "a set",
    0x91: "a set",
    ord("S"): "a string of Python 2",
    ord("T"): "a string of Python 2",
    ord("U"): "a string of Python 2",
    ord("B"): "bytes",
    ord("C"): "bytes",
    0x8E: "bytes",
    0x96: "bytes",
    0x97: "a buffer",
    0x98: "a buffer",
}
