"""Exact nearest neighbours in feature banks of any size, within a bounded amount of memory.

How the search works. Products are computed in float32 for a tile of queries against a tile of the gallery. The k
largest of n values lie in the k groups with the largest maxima; so a row of products is reduced to maxima of 32
neighbouring gallery items, those of the k best groups to maxima of 8, and only the last 8 k values are ranked one by
one. Each query keeps the k best found so far, and a gallery tile is read, normalised and dropped again, so memory
depends neither on the number of gallery items nor, beyond what is returned, on the number of queries.

Order. Neighbours are ordered by similarity, largest first; equal similarities by gallery index, lowest first, at
every stage: the result is a function of the float32 similarities alone. Tile boundaries depend on the problem's sizes
and never on the number of ranks, so that every number of ranks computes the same products. Another tiling may round
a product differently in its last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ibot_eval import distributed
from ibot_eval.errors import ConfigError, DataError, MissingExtra

Features = np.ndarray | Sequence[np.ndarray]
"""(n, D) numbers, or several (n, D_i) that are joined along the last axis tile by tile, never as a whole."""
Backend = Literal["auto", "torch", "faiss"]

QUERY_TILE = 1024
GALLERY_TILE = 51_200
GALLERY_TILE_BYTES = 96 << 20
# Of all queries of a rank, as many tiles as fit here share one pass over the gallery.
QUERY_BYTES = 64 << 20
# Products are computed this many columns at a time: operands then stay in the processor's caches.
PRODUCT_COLUMNS = 4096
# Products ranked at a time, after the first reduction.
SELECTION_VALUES = 1 << 21
GROUPS = (32, 8, 1)


def search(
    queries: Features,
    gallery: Features,
    k: int,
    *,
    metric: Literal["cosine", "dot"] = "cosine",
    device: torch.device | str = "cpu",
    exclude_self: bool = False,
    backend: Backend = "auto",
    query_ids: Sequence[str] | None = None,
    gallery_ids: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` most similar gallery items of every query. With several ranks each does a part, and all get the whole.

    Args:
        queries: (q, D) features of any float type, in memory or memory-mapped.
        gallery: (n, D) features.
        k: 1 to n (to n - 1 with ``exclude_self``).
        metric: "cosine" (a row of zeros has similarity 0 to everything) or "dot".
        device: where to compute; features move there tile by tile. For "mps" the CPU is used: it cannot rank 64-bit
            keys.
        exclude_self: queries and gallery are the same items in the same order; no item is its own neighbour.
        backend: "torch"; "faiss" (IndexFlatIP on the CPU, tile by tile: equally exact, but which of several equally
            similar items end the list is faiss's choice); or "auto", which is torch: the faster of the two where
            both were measured (tests/benchmarks/bench_knn.py).
        query_ids: names for error messages, such as image paths. Default: row numbers.
        gallery_ids: likewise for the gallery.

    Returns:
        similarities (q, k) float32 and gallery indices (q, k) int64; most similar first, ties by index.

    Raises:
        DataError: a feature that is NaN or infinite, naming the row; an empty gallery; unequal widths.
        ConfigError: k outside of its range.
        MissingExtra: backend "faiss" without faiss.
    """
    options: dict[str, Any] = {
        "metric": metric,
        "device": device,
        "exclude_self": exclude_self,
        "backend": backend,
        "query_ids": query_ids,
        "gallery_ids": gallery_ids,
    }
    tiles = distributed.everywhere(lambda: list(search_tiles(queries, gallery, k, **options)))
    # An empty tile of its own lets a rank without queries take part.
    rows = np.concatenate([np.empty(0, np.int64), *(np.arange(t.start, t.stop) for t, _, _ in tiles)])
    similarities = np.concatenate([np.empty((0, k), np.float32), *(s for _, s, _ in tiles)])
    indices = np.concatenate([np.empty((0, k), np.int64), *(i for _, _, i in tiles)])
    if distributed.world_size() == 1:
        return similarities, indices
    where, total = torch.from_numpy(rows), _shape(queries)[0]
    return (
        distributed.gather_rows(torch.from_numpy(similarities), where, total).numpy(),
        distributed.gather_rows(torch.from_numpy(indices), where, total).numpy(),
    )


def search_tiles(
    queries: Features,
    gallery: Features,
    k: int,
    *,
    metric: Literal["cosine", "dot"] = "cosine",
    device: torch.device | str = "cpu",
    exclude_self: bool = False,
    backend: Backend = "auto",
    query_ids: Sequence[str] | None = None,
    gallery_ids: Sequence[str] | None = None,
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """As :func:`search`, but a tile of at most ``QUERY_TILE`` queries at a time, and only the tiles of this rank.

    Tile t belongs to rank t % world size. Not a collective. A caller who reduces each tile at once never holds all
    neighbours.

    Yields:
        the tile's rows among the queries, similarities (rows, k) float32, and indices (rows, k) int64.
    """
    (total, width), (size, gallery_width) = _shape(queries), _shape(gallery)
    if width != gallery_width:
        raise DataError(
            f"the queries have {width} features and the gallery {gallery_width}",
            todo="take both from the same checkpoint, blocks and pooling",
        )
    if exclude_self and total != size:
        raise ValueError(f"exclude_self needs queries and gallery to be the same items: {total} and {size} rows")
    _check_k(k, size, exclude_self)
    device = torch.device(device)
    if backend == "faiss" or device.type == "mps":
        device = torch.device("cpu")
    ranker = _Faiss(k) if backend == "faiss" else _Torch(k, device)
    tiles = [slice(a, min(a + QUERY_TILE, total)) for a in range(0, total, QUERY_TILE)]
    tiles = tiles[distributed.rank() :: distributed.world_size()]
    at_once = max(1, QUERY_BYTES // (QUERY_TILE * (8 * k + 4 * width)))
    for first in range(0, len(tiles), at_once):
        group = tiles[first : first + at_once]
        loaded = [_load(queries, rows, metric, device, "query", query_ids) for rows in group]
        best: list[Tensor | None] = [None] * len(group)
        for span in _spans(size, width):
            items = _load(gallery, span, metric, device, "gallery item", gallery_ids)
            for i, rows in enumerate(group):
                own = torch.arange(rows.start - span.start, rows.stop - span.start) if exclude_self else None
                # The key of item 0 of this tile is that of item span.start of the gallery.
                keys = ranker.best(loaded[i], items, own).sub_(span.start)
                known = best[i]
                best[i] = keys if known is None else _largest(torch.cat([known, keys], 1), k)
            del items  # before the next tile is loaded
        for rows, keys in zip(group, best, strict=True):
            assert keys is not None
            similarities, indices = _decode(_descending(keys))
            yield rows, similarities.cpu().numpy(), indices.cpu().numpy()


class Gallery:
    """A gallery that stays on a device, for queries that come batch by batch: :func:`search` would read it each time.

    Args:
        features: (n, D) features, as for :func:`search`; by cosine.
        k: 1 to n, the number of neighbours.
        device: where to compute; for "mps" the CPU.
        ids: names of the items for error messages.

    Raises:
        DataError: a feature that is NaN or infinite, naming the row; an empty gallery.
        ConfigError: k outside of its range.
    """

    def __init__(
        self, features: Features, k: int, *, device: torch.device | str = "cpu", ids: Sequence[str] | None = None
    ) -> None:
        size, self.width = _shape(features)
        _check_k(k, size)
        device = torch.device(device)
        self.device = torch.device("cpu") if device.type == "mps" else device
        self._ranker, self._k = _Torch(k, self.device), k
        self._spans = _spans(size, self.width)
        self._tiles = [_load(features, span, "cosine", self.device, "gallery item", ids) for span in self._spans]

    def nearest(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The k most similar items of every query. Not a collective: with several ranks each asks for its own.

        Args:
            queries: (B, D) float; a row of zeros has similarity 0 to everything.

        Returns:
            similarities (B, k) float32 and indices (B, k) int64 on the gallery's device; most similar first, ties by
            index. NaN similarities to any items for a query that is not finite.
        """
        finite = torch.isfinite(queries).all(dim=1, keepdim=True).to(self.device)
        queries = torch.where(finite, queries.to(self.device, torch.float32), 0)
        queries = torch.nn.functional.normalize(queries, dim=1)
        best = None
        for span, items in zip(self._spans, self._tiles, strict=True):
            keys = self._ranker.best(queries, items, None).sub_(span.start)
            best = keys if best is None else _largest(torch.cat([best, keys], 1), self._k)
        assert best is not None
        similarities, indices = _decode(_descending(best))
        return torch.where(finite, similarities, torch.nan), indices


class _Torch:
    """Keys of the k best of a gallery tile (fewer if it has fewer), by torch."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.k = k
        self.products = torch.empty(0, device=device)

    def best(self, queries: Tensor, items: Tensor, own: Tensor | None) -> Tensor:
        """``own``: (rows,) position of each query's own item relative to the tile, to be left out."""
        rows, columns = len(queries), -(-len(items) // GROUPS[0]) * GROUPS[0]
        groups = columns // GROUPS[0]
        if self.products.numel() < rows * columns:
            self.products = torch.empty(rows * columns, device=queries.device)
        products = self.products[: rows * columns].view(rows, columns)
        maxima = torch.empty(rows, groups, device=queries.device) if groups > self.k else None
        for a in range(0, columns, PRODUCT_COLUMNS):
            part = items[a : a + PRODUCT_COLUMNS]
            values = products[:, a : a + PRODUCT_COLUMNS]
            torch.mm(queries, part.T, out=values[:, : len(part)])
            values[:, len(part) :] = -torch.inf
            if own is not None:
                inside = torch.nonzero((own >= a) & (own < a + len(part))).flatten()
                values[inside.to(values.device), (own[inside] - a).to(values.device)] = -torch.inf
            if maxima is not None:  # now, while the products are in the cache
                first = a // GROUPS[0]
                of_part = maxima[:, first : first + values.shape[1] // GROUPS[0]]
                torch.amax(values.unflatten(1, (-1, GROUPS[0])), 2, out=of_part)
        step = max(1, SELECTION_VALUES // min(self.k * GROUPS[0], columns))
        return torch.cat(
            [
                _select(products[i : i + step], None if maxima is None else maxima[i : i + step], self.k)
                for i in range(0, rows, step)
            ]
        )


class _Faiss:
    """The same by faiss."""

    def __init__(self, k: int) -> None:
        try:
            import faiss
        except ImportError:
            raise MissingExtra(
                "backend faiss was asked for, but faiss is not installed",
                todo="pip install 'ibot-eval[faiss]', or use --backend torch, which is exact as well",
            ) from None
        self.k, self.faiss = k, faiss

    def best(self, queries: Tensor, items: Tensor, own: Tensor | None) -> Tensor:
        index = self.faiss.IndexFlatIP(items.shape[1])
        index.add(items.numpy())
        k = min(self.k + (own is not None), len(items))
        similarities, indices = (torch.from_numpy(array) for array in index.search(queries.numpy(), k))
        if own is not None:
            similarities[indices == own[:, None]] = -torch.inf
        return _largest(_encode(similarities).sub_(indices), self.k)


def _select(values: Tensor, maxima: Tensor | None, k: int) -> Tensor:
    """Keys of the largest ``values`` (rows, columns), columns % 32 == 0.

    Args:
        maxima: (rows, columns / 32) maxima of each 32 columns, or None to rank all values.

    Returns:
        (rows, min(k, columns)) in no order, their positions being columns.
    """
    rows, columns = values.shape
    if maxima is None:
        return _largest(_encode(values).sub_(torch.arange(columns, device=values.device)), k)
    keys = _largest(_encode(maxima).sub_(torch.arange(maxima.shape[1], device=values.device)), k)
    for size, finer in itertools.pairwise(GROUPS):
        chosen, count = _position(keys), columns // size
        first = torch.arange(0, rows * count, count, device=values.device)
        parts = values.reshape(-1, size).index_select(0, (chosen + first[:, None]).flatten())
        parts = parts.view(rows, k, size // finer, finer)
        keys = _encode(parts.amax(3) if finer > 1 else parts.squeeze(3))
        keys -= (chosen * (size // finer))[:, :, None]
        keys -= torch.arange(size // finer, device=values.device)
        keys = _largest(keys.flatten(1), k)
    return keys


# Keys. A similarity and a position p < 2^32 make one integer, o * 2^32 - p, where o is the similarity's bit pattern
# turned into an integer of the same order. Larger key: larger similarity, or the same and a lower position. Keys are
# unique, so that selecting by key leaves nothing to chance, and adding to the position is subtracting from the key.


def _encode(values: Tensor) -> Tensor:
    # Adding 0 turns -0 into 0: the two are equal, but their bits are not.
    return _flip((values + 0.0).view(torch.int32)).long().bitwise_left_shift_(32)


def _position(keys: Tensor) -> Tensor:
    return keys.neg().bitwise_and_(0xFFFFFFFF)


def _decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    positions = _position(keys)
    return _flip((keys + positions).bitwise_right_shift_(32).int()).view(torch.float32), positions


def _flip(bits: Tensor) -> Tensor:
    """Bits of a float32 to an integer of the same order, and back: negative numbers count downwards."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _largest(keys: Tensor, k: int) -> Tensor:
    if keys.shape[1] <= k:
        return keys
    if keys.device.type == "cpu":
        # Half the time of torch.topk.
        array = keys.numpy()
        array.partition(array.shape[1] - k, axis=1)
        return keys[:, -k:]
    return keys.topk(k, dim=1, sorted=False).values


def _descending(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy(), axis=1)).flip(1)
    return keys.sort(dim=1, descending=True).values


def _check_k(k: int, size: int, exclude_self: bool = False) -> None:
    if size <= exclude_self:
        raise DataError("the gallery is empty" if not size else "the gallery has one item, which matches only itself")
    if not 1 <= k <= size - exclude_self:
        raise ConfigError(
            f"{k} neighbours of a gallery of {size - exclude_self} items", todo=f"choose 1 to {size - exclude_self}"
        )


def _spans(size: int, width: int) -> list[slice]:
    """Gallery tiles of equal size, as few as the limits allow."""
    count = -(-size // max(1, min(GALLERY_TILE, GALLERY_TILE_BYTES // (4 * width))))
    step = -(-size // count)
    return [slice(a, min(a + step, size)) for a in range(0, size, step)]


def _shape(features: Features) -> tuple[int, int]:
    parts = _parts(features)
    if any(p.ndim != 2 for p in parts) or len({len(p) for p in parts}) != 1:
        raise ValueError(f"features must be (n, D), n the same for all: {[p.shape for p in parts]}")
    return len(parts[0]), sum(p.shape[1] for p in parts)


def _parts(features: Features) -> Sequence[np.ndarray]:
    return [features] if isinstance(features, np.ndarray) else features


def _load(
    features: Features, rows: slice, metric: str, device: torch.device, name: str, ids: Sequence[str] | None
) -> Tensor:
    """(rows, D) float32 on ``device``, of unit length for cosine, checked to be finite."""
    # Memory of torch's, not NumPy's: products of operands that are not aligned to cache lines take a sixth longer.
    tile = torch.empty(rows.stop - rows.start, _shape(features)[1])
    host, column = tile.numpy(), 0
    with np.errstate(over="ignore"):
        for part in _parts(features):
            host[:, column : column + part.shape[1]] = part[rows]
            column += part.shape[1]
    tile = tile.to(device)
    norms = torch.linalg.vector_norm(tile, dim=1, keepdim=True)
    # Squares overflow above 1.8e19 and lose their digits below about 1e-17, although the direction is well defined.
    odd = torch.nonzero(~((norms > 1e-15) & (norms < torch.inf)).flatten()).flatten()
    if len(odd):
        strange = tile[odd]
        bad = odd[~strange.isfinite().all(1)]
        if metric == "dot":
            bad = odd[~norms[odd].isfinite().flatten()]
        if len(bad):
            row = rows.start + int(bad[0])
            raise DataError(
                f"the features of {name} {row if ids is None else ids[row]} are NaN, infinite or too large",
                todo="extract them with --precision fp32; if they still are, look at the image and the checkpoint",
            )
        peaks = strange.abs().amax(1, keepdim=True)
        strange /= torch.where(peaks > 0, peaks, 1)
        if metric == "cosine":
            tile[odd] = strange
        norms[odd] = torch.linalg.vector_norm(strange, dim=1, keepdim=True)
    if metric == "cosine":
        tile /= torch.where(norms > 0, norms, 1)
    return tile
