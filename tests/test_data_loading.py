"""The loader: order, bad images, killed workers, and nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data._utils import worker as torch_worker

from ibot_eval.data.folders import FolderSplit
from ibot_eval.data.loading import explain_worker_death, image_loader
from ibot_eval.data.splits import ImageSplit
from ibot_eval.data.transforms import EvalTransform
from ibot_eval.errors import BadImage, DataError, UserError

from . import images

TRANSFORM = EvalTransform(8, 8, "bicubic", (0, 0, 0), (1, 1, 1))
BAD = (3, 4, 8)


@pytest.fixture
def split(tmp_path: Path) -> FolderSplit:
    """Ten images, each of one grey."""
    files = [f"{i}.png" for i in range(10)]
    for i, file in enumerate(files):
        images.save(tmp_path / file, np.full((9, 12, 3), 10 * i, np.uint8))
    return FolderSplit("some", tmp_path, files, np.zeros(10))


@pytest.fixture
def damaged(split: FolderSplit) -> FolderSplit:
    for i in BAD:
        split.path(i).write_bytes(b"")
    return split


class Slow(ImageSplit):
    """Takes its time, or ends its process the hard way."""

    def __init__(self, suicidal: bool = False) -> None:
        self.name, self.labels, self.suicidal = "slow", np.zeros(100, np.int64), suicidal
        self.image_ids = [str(i) for i in range(100)]

    def load(self, i: int) -> Image.Image:
        if self.suicidal and i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0 if self.suicidal else 0.2)
        return Image.new("RGB", (8, 8))

    def take(self, indices: Sequence[int] | np.ndarray) -> Slow:
        raise NotImplementedError

    def _fingerprint(self) -> str:
        return ""


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 9])
def test_order_is_kept(split: FolderSplit, workers: int) -> None:
    batches = [[7, 1, 3], [0], [9, 8, 2, 4]]
    got = list(image_loader(split, TRANSFORM, batches, workers))
    assert [b.indices.tolist() for b in got] == batches
    for batch in got:
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous()
        assert batch.indices.dtype == torch.int64
        assert batch.images.shape == (len(batch.indices), 3, 8, 8)
        assert batch.images[:, 1, 4, 4].tolist() == [10 * i for i in batch.indices.tolist()]
        assert batch.bad == []


def test_nothing_to_do(split: FolderSplit) -> None:
    assert list(image_loader(split, TRANSFORM, [], 2)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_names_the_file_in_this_process(damaged: FolderSplit, workers: int) -> None:
    loader = image_loader(damaged, TRANSFORM, [[0, 1], [2, 3], [4, 5]], workers)
    assert next(loader).indices.tolist() == [0, 1]
    with pytest.raises(BadImage) as caught:
        next(loader)
    assert str(damaged.path(3)) in str(caught.value)
    assert "0 bytes" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "--bad-images skip" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_skip_leaves_out_and_lists(damaged: FolderSplit, workers: int) -> None:
    batches = [[0, 1, 2], [5, 3, 6], [4, 8], [9]]
    got = list(image_loader(damaged, TRANSFORM, batches, workers, bad_images="skip"))
    assert [b.indices.tolist() for b in got] == [[0, 1, 2], [5, 6], [], [9]]
    assert [[i for i, _ in b.bad] for b in got] == [[], [3], [4, 8], []]
    assert "4.png" in got[2].bad[0][1]
    assert got[1].images[:, 0, 0, 0].tolist() == [50, 60]
    assert len(got[2].images) == 0


def test_other_user_errors_stop_even_with_skip(split: FolderSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DataError, match="no permission"):
        list(image_loader(split, TRANSFORM, [[0]], 0, bad_images="skip"))


class Faulty:
    def __call__(self, image: Image.Image) -> Tensor:
        raise ZeroDivisionError("a fault of ours")


def test_faults_of_ours_keep_their_traceback(split: FolderSplit) -> None:
    with pytest.raises(ZeroDivisionError, match=r"(?s)Traceback.*a fault of ours"):
        list(image_loader(split, Faulty(), [[0]], 1))


def test_the_global_generator_is_left_alone(split: FolderSplit) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(image_loader(split, TRANSFORM, [[0], [1]], 1))
    assert torch.equal(torch.rand(2), expected)


def test_spawned_workers(split: FolderSplit) -> None:
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        got = list(image_loader(split, TRANSFORM, [[4], [2]], 1))
    finally:
        multiprocessing.set_start_method(method, force=True)
    assert [b.images[0, 0, 0, 0].item() for b in got] == [40, 20]


def test_a_killed_worker_is_explained() -> None:
    with pytest.raises(UserError, match=r"(?s)process was killed.*memory.*--workers 1"), explain_worker_death():
        list(image_loader(Slow(suicidal=True), TRANSFORM, [[0], [1], [2], [3]], 1))
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()  # the end of another process does not bring the error back


def test_other_runtime_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="mine"), explain_worker_death():
        raise RuntimeError("mine")


def test_leaving_early_stops_the_workers(split: FolderSplit) -> None:
    before = set(multiprocessing.active_children())
    loader = image_loader(split, TRANSFORM, [[i] for i in range(10)], 2)
    next(loader)
    ours = set(multiprocessing.active_children()) - before
    assert len(ours) == 2
    loader.close()
    assert not ours & set(multiprocessing.active_children())


def _report_worker(pipe: Connection) -> None:
    torch_worker.MP_STATUS_CHECK_INTERVAL = 0.5  # how often a worker looks for its parent; 5 s otherwise
    loader = image_loader(Slow(), TRANSFORM, [[i] for i in range(100)], 1)
    next(loader)
    pipe.send(multiprocessing.active_children()[0].pid)
    list(loader)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_killing_the_main_process_leaves_no_worker() -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    main = fork.Process(target=_report_worker, args=(theirs,))
    main.start()
    worker = ours.recv()
    assert _runs(worker)
    main.kill()
    main.join()
    deadline = time.monotonic() + 20
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(worker)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_batches_do_not_need_shared_memory(tmp_path: Path) -> None:
    """A full /dev/shm made torch lose a batch and wait for it for ever; a limit on file sizes does the same."""
    code = (
        "import resource, numpy as np; from ibot_eval.data.loading import image_loader; "
        "from ibot_eval.data.opening import open_data; from ibot_eval.data.transforms import EvalTransform; "
        "from ibot_eval.settings import DataSettings; "
        "transform = EvalTransform(64, 64, 'bicubic', (0.5,) * 3, (0.5,) * 3); "
        "split = open_data(DataSettings(data='demo')).splits['test']; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "print(sum(len(batch.indices) for batch in image_loader(split, transform, [range(16), range(16, 32)], 1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "32", done.stderr
