"""How many patches a picture is cut into."""

from __future__ import annotations

from math import isqrt

from ibot_eval.errors import ConfigError


def whole_patches(height: int, width: int, side: int, patch: int, max_tokens: int) -> tuple[tuple[int, int], list[str]]:
    """Rows and columns of patches for a picture of height x width pixels, and remarks.

    The shorter side is about ``side`` pixels, rounded to a whole number of patches, or as many as the limit allows. The
    longer side follows from that number, rounded: half a patch from the picture's proportions at most, and less than
    one where the limit leaves no room for the last patch.

    Args:
        side: pixels.
        patch: side of a patch in pixels.
        max_tokens: rows times columns at most.

    Raises:
        ConfigError: not even one row of patches fits the limit.
    """
    few, many = min(height, width), max(height, width)
    notes = [f"enlarged: the picture has only {width} x {height} pixels"] if side >= 2 * few else []
    shorter = max(1, round(side / patch))
    longer = round(shorter * many / few)
    asked = shorter * longer
    if asked > max_tokens:
        shorter = max(1, isqrt(max_tokens * few // many))
        longer = round(shorter * many / few)
        if longer > max_tokens:
            raise ConfigError(
                f"a picture of {width:,} x {height:,} pixels cannot be cut into at most {max_tokens:,} patches: even "
                f"one row of them would have {longer:,}",
                todo="use a part of the picture",
            )
        longer = min(longer, max_tokens // shorter)
    rows, columns = (shorter, longer) if height <= width else (longer, shorter)
    if asked > max_tokens:
        notes.append(
            f"reduced to {columns * patch:,} x {rows * patch:,} pixels: a shorter side of {side} would be {asked:,} "
            f"patches, and {max_tokens:,} are the limit"
        )
    return (rows, columns), notes
