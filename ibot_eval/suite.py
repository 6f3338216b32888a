"""Many protocols on one checkpoint and one data set, from shared feature banks.

The banks that all frozen protocols ask for are extracted together, so that each image goes through the backbone once
per transform; each protocol then runs as it would alone and finds its banks in the cache. Its record lies in
``SUITE/PROTOCOL/``, and a suite that is started again does what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ibot_eval import distributed, runner
from ibot_eval.data.splits import Data
from ibot_eval.errors import RecordError
from ibot_eval.interruption import terminated_as_exception
from ibot_eval.protocol import FrozenProtocol
from ibot_eval.record import EvalRecord, readable_records
from ibot_eval.recording import say
from ibot_eval.run_folder import claim_suite, set_aside, suite_folder, unfinished
from ibot_eval.settings import RunSettings
from ibot_eval.suite_material import Material, Member, extract_together, going_on
from ibot_eval.training.holding import hold

Overwrite = Literal["never", "failed", "always"]


@dataclass(frozen=True)
class Outcome:
    """How a suite ended; the same on every rank."""

    folder: Path
    records: list[EvalRecord]
    """All that the suite's folder holds, those of the members first and in their order."""
    failed: list[str]
    """Members that have no successful run."""


def run_suite(members: Sequence[Member], settings: RunSettings, overwrite: Overwrite = "failed") -> Outcome:
    """Runs ``members`` and saves a record of each, whatever becomes of the others. A collective.

    Args:
        members: of different names.
        settings: what the members share. A member whose recipe sets another checkpoint or engine runs by itself.
        overwrite: never: only members without a record are run; failed: also those whose run did not end well, or was
            made by another version of the protocol; always: all. Runs are moved aside, not deleted. A protocol that
            can resume goes on with its unfinished run, except with "always".

    Raises:
        UserError: the checkpoint or the data cannot be opened, or the folder belongs to other work.
        KeyboardInterrupt, Interrupted: what is left is done when the suite is started again.
        Exception: with several ranks, a fault of a protocol: ranks may then be at different places, so that nothing
            can follow.
    """
    with ExitStack() as stack:
        stack.enter_context(terminated_as_exception())
        device = distributed.init(settings.engine.device)
        material = distributed.everywhere(lambda: Material(settings, device))
        identity = {
            **distributed.everywhere(material.identity),
            "precision": settings.engine.precision,
            "seed": settings.engine.seed,
            "published names": [settings.output.method, settings.output.data_name],
            "recipes": {member.name: list(member.recipe) for member in members if member.recipe},
        }
        folder = Path(distributed.from_main(lambda: str(suite_folder(settings, identity))))
        stack.callback(hold(folder).release)
        distributed.from_main(lambda: claim_suite(folder, identity))
        due = distributed.from_main(lambda: [m.name for m in members if _is_due(folder / m.name, m, overwrite)])
        todo = [member for member in members if member.name in due]
        if kept := [member.name for member in members if member.name not in due]:
            say([f"suite: left as they are: {', '.join(kept)} (--overwrite always runs them again)"])
        # Those that are not frozen may take days.
        todo.sort(key=lambda member: not isinstance(member.protocol, FrozenProtocol))
        stack.enter_context(material.banks_in_one_place())
        images = extract_together(todo, material)
        for place, member in enumerate(todo, start=1):
            say([f"suite: {member.name} ({place} of {len(todo)})"])
            with going_on(member.name, settings):
                distributed.from_main(lambda member=member: _make_way(folder / member.name, member, overwrite))
                _run(member, folder, material, images.get(member.name))
    return distributed.from_main(lambda: _outcome(folder, members))


def _run(member: Member, folder: Path, material: Material, data: Data | None) -> None:
    own = member.settings
    shares = material.serves(member)
    runner.run(
        member.name,
        member.protocol,
        replace(own, output=replace(own.output, output=folder, name=member.name)),
        asked=member.asked,
        loaded=material.loaded if shares else None,
        data=data,
        cache=material.cache if shares else None,
        told=material.told,
        title=f"{folder.name}/{member.name}",
    )


def _record(run: Path) -> EvalRecord | None:
    try:
        return EvalRecord.load(run)
    except RecordError:
        return None


def _is_due(run: Path, member: Member, overwrite: Overwrite) -> bool:
    if overwrite == "always" or not (run / "record.json").exists():
        return True
    record = _record(run)
    done = record and record.status == "success" and record.protocol_version == member.protocol.version
    return overwrite == "failed" and not done


def _make_way(run: Path, member: Member, overwrite: Overwrite) -> None:
    if not run.exists():
        return
    record = _record(run)
    resumes = (
        overwrite != "always"
        and member.protocol.resumable
        and unfinished(run, member.name)
        and record is not None
        and record.protocol_version == member.protocol.version
    )
    if not resumes:
        say([f"suite: the earlier run of {member.name} is now {set_aside(run)}"])


def _outcome(folder: Path, members: Sequence[Member]) -> Outcome:
    records, problems = readable_records(folder)
    say(f"left out: {problem}" for problem in problems)
    order = [member.name for member in members]
    records.sort(key=lambda r: (order.index(r.protocol) if r.protocol in order else len(order), r.protocol))
    good = {record.protocol for record in records if record.status == "success"}
    return Outcome(folder, records, [name for name in order if name not in good])
