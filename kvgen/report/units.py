"""Numbers as people read them."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """``1 token``, ``2,000 tokens``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def bytes_text(count: float) -> str:
    """Bytes in the largest binary unit that keeps at least 1 before the point: ``45.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        figures = f"{count:.0f}" if unit == "B" else f"{count:.1f}"
        if float(figures) < 1024:  # after rounding, so that it never says 1024.0 KiB
            return f"{figures} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Seconds with three figures in a unit that fits: ``47.3 ms``, ``1.52 s``."""
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        figures = _three_figures(seconds * scale)
        if float(figures) < 1000:
            return f"{figures} {unit}"
    return f"{_three_figures(seconds)} s"


def seconds_with_spread(seconds: float, spread: float) -> str:
    """Both in one unit, the spread no finer than the value: ``47.3 ± 1.2 ms``."""
    scale, unit = next((s for s in ((1.0, "s"), (1e3, "ms")) if seconds * s[0] >= 1), (1e6, "µs"))
    value = _three_figures(seconds * scale)
    decimals = len(value.partition(".")[2])
    return f"{value} ± {spread * scale:.{decimals}f} {unit}"


def factor_with_spread(value: float, spread: float) -> str:
    """A ratio: ``18.3x ± 0.4``."""
    text = _three_figures(value)
    return f"{text}x ± {spread:.{len(text.partition('.')[2])}f}"


def _three_figures(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def visible(text: str) -> str:
    """``text`` with control characters, escape included, spelled out so that none can act."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def visible_lines(text: str) -> str:
    """As ``visible``, but line breaks and tabs stay what they are."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if ord(character) > 127 and _joins(character):
        return character
    return character.encode("unicode_escape").decode("ascii")


def _joins(character: str) -> bool:
    """Characters that are not printable by themselves but belong to ordinary text."""
    import unicodedata

    # Joiners of emoji and scripts (Cf), and spaces other than the plain one (Zs).
    return unicodedata.category(character) in ("Zs", "Cf") and character not in _BIDI_CONTROLS


# They reorder what stands around them, beyond their own line's text.
_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
