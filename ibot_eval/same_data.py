"""Whether two runs used the same data, and if not, what is different."""

from __future__ import annotations

from ibot_eval.record import EvalRecord

CHOOSING = ("train_split", "test_split", "test_labels", "train_per_class", "test_per_class", "fingerprint")
"""Settings that decide which images a run uses and how they are recognised."""


def data_differences(a: EvalRecord, b: EvalRecord, names: tuple[str, str]) -> tuple[list[str], bool]:
    """Why the data fingerprints of two records differ.

    Args:
        names: what to call the two.

    Returns:
        what differs, a line each, at least one; and whether it may be the same images in files of other times.
    """
    found, marks = [], []
    splits_a, splits_b = (record.data.get("splits") or {} for record in (a, b))
    for role in dict.fromkeys([*splits_a, *splits_b]):
        if role not in splits_a or role not in splits_b:
            user, other = names if role in splits_a else reversed(names)
            found.append(f"{role}: used by {user}, not by {other}")
            continue
        if splits_a[role].get("fingerprint") == splits_b[role].get("fingerprint"):
            continue
        counts = [_images(record, role) for record in (a, b)]
        if counts[0] == counts[1]:
            marks.append(f"{role}: {counts[0]:,} images in both, but their names, labels, sizes or times differ")
        else:
            found.append(f"{role}: {counts[0]:,} images in {names[0]}, {counts[1]:,} in {names[1]}")
    found += _class_differences(a, b, names)
    flags = []
    for setting in CHOOSING:
        values = [record.config.get(setting) for record in (a, b)]
        if values[0] != values[1]:
            said = ["not given" if value is None else value for value in values]
            flags.append(f"--{setting.replace('_', '-')}: {said[0]} in {names[0]}, {said[1]} in {names[1]}")
    lines = [*found, *marks, *flags]
    prints = [str(record.data.get("fingerprint"))[:12] for record in (a, b)]
    return lines or [f"fingerprint: {prints[0]} in {names[0]}, {prints[1]} in {names[1]}"], bool(marks) and not found


def skipped_images(record: EvalRecord, role: str | None = None) -> set[str]:
    """Images that were left out as unreadable, of one role or of all."""
    skipped = record.data.get("skipped_images") or {}
    return {image for of, images in skipped.items() if role in (None, of) for image in images}


def _images(record: EvalRecord, role: str) -> int:
    """How many images the split has, those that could not be read included."""
    return record.data["splits"][role].get("images", 0) + len(skipped_images(record, role))


def _class_differences(a: EvalRecord, b: EvalRecord, names: tuple[str, str]) -> list[str]:
    indices = [record.data.get("class_to_idx") or {} for record in (a, b)]
    one, two = (sorted(index, key=index.__getitem__) for index in indices)
    if one == two:
        return []
    if len(one) != len(two):
        return [f"classes: {len(one):,} in {names[0]}, {len(two):,} in {names[1]}"]
    i = next(i for i in range(len(one)) if one[i] != two[i])
    what = "order of the classes" if set(one) == set(two) else "classes"
    return [f"{what}: number {i} is {one[i]!r} in {names[0]}, {two[i]!r} in {names[1]}"]
