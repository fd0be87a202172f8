"""Inputs shared by tests: ragged batches with empty requests, shuffled page tables, masks, strides and canaries.

Everything here is plain torch on any device and depends on torch's random state only. Wherever memory is not part of
the problem (free pages, slots past a sequence's end, gaps between rows) stands NaN, so that a kernel that reads or
writes it is seen.
"""

from dataclasses import dataclass

import torch

from flashinfer.testing import guard

# around tile, page and split borders, and the degenerate ones
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257, 509, 1023, 1024, 1025)


@dataclass(frozen=True)
class Ragged:
    """A batch without padding: the rows of request i are `indptr[i]` to `indptr[i + 1]`.

    q : [sum of qo_lens, num_qo_heads, head_dim_qk];  k : [sum of kv_lens, num_kv_heads, head_dim_qk];
    v : [sum of kv_lens, num_kv_heads, head_dim_vo];  qo_indptr, kv_indptr : int32 [batch + 1].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor

    def request(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of request i."""
        qo, kv = (slice(int(p[i]), int(p[i + 1])) for p in (self.qo_indptr, self.kv_indptr))
        return self.q[qo], self.k[kv], self.v[kv]


@dataclass(frozen=True)
class Paged:
    """The same keys and values behind a page table whose pages lie in random order among unused ones.

    kv_cache : [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD) or [num_pages, 2, num_kv_heads, page_size,
    head_dim] (HND), or a pair (k_cache, v_cache) of the same without the 2 where K and V differ in head_dim.
    indptr int32 [batch + 1], indices int32 [pages in use], last_page_len int32 [batch]; a request without keys has no
    page and last_page_len 0.
    """

    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int
    kv_layout: str

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k_cache and v_cache, as views."""
        if isinstance(self.kv_cache, tuple):
            return self.kv_cache
        return self.kv_cache[:, 0], self.kv_cache[:, 1]


def indptr(lengths, device="cpu") -> torch.Tensor:
    """int32 [len(lengths) + 1], the running sum of lengths from 0."""
    total = torch.zeros(len(lengths) + 1, dtype=torch.int64, device="cpu")
    total[1:] = torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0)
    return total.to(torch.int32).to(device)


def lengths(batch: int, longest: int = LENGTHS[-1]) -> list[int]:
    """`batch` lengths drawn from LENGTHS up to `longest`; the first is `longest` and, from 3 on, one is 0."""
    pool = [n for n in LENGTHS if n <= longest]
    drawn = [pool[int(i)] for i in torch.randint(len(pool), (batch,), device="cpu")]
    if batch:
        drawn[0] = longest
    if batch >= 3:
        drawn[batch // 2] = 0
    return drawn


def randn(*shape: int, dtype: torch.dtype = torch.float32, device="cpu") -> torch.Tensor:
    """Standard normal values in any floating dtype, float8 included."""
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)


def ragged_batch(
    qo_lens,
    kv_lens,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    head_dim_vo: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device="cpu",
) -> Ragged:
    """A random ragged batch of the given lengths; lengths of 0 are kept."""
    kv = dict(dtype=kv_dtype or dtype, device=device)
    return Ragged(
        randn(sum(qo_lens), num_qo_heads, head_dim, dtype=dtype, device=device),
        randn(sum(kv_lens), num_kv_heads, head_dim, **kv),
        randn(sum(kv_lens), num_kv_heads, head_dim_vo or head_dim, **kv),
        indptr(qo_lens, device),
        indptr(kv_lens, device),
    )


def paged(
    ragged: Ragged, page_size: int, kv_layout: str = "NHD", *, spare: int = 3, fill: float = float("nan")
) -> Paged:
    """Move the keys and values of a ragged batch into a paged cache.

    `spare` pages more than needed are in the cache; they and the slots past each sequence's end hold `fill`.
    """
    device = ragged.k.device
    kv_lens = ragged.kv_indptr.diff().tolist()
    pages = [-(-n // page_size) for n in kv_lens]
    total = sum(pages) + spare
    table = torch.randperm(total, device="cpu")[: sum(pages)]
    caches = [_blank(total, page_size, x, fill) for x in (ragged.k, ragged.v)]
    start = page = 0
    for n, used in zip(kv_lens, pages):
        slot = torch.arange(n, device="cpu")
        where = table[page : page + used][slot // page_size].to(device), (slot % page_size).to(device)
        for cache, rows in zip(caches, (ragged.k, ragged.v)):
            cache[where] = rows[start : start + n]
        start, page = start + n, page + used
    if kv_layout == "HND":
        caches = [c.transpose(1, 2).contiguous() for c in caches]
    same = caches[0].shape == caches[1].shape
    last = [n - (used - 1) * page_size if used else 0 for n, used in zip(kv_lens, pages)]
    return Paged(
        torch.stack(caches, 1) if same else tuple(caches),
        indptr(pages, device),
        table.to(torch.int32).to(device),
        torch.tensor(last, dtype=torch.int32, device=device),
        page_size,
        kv_layout,
    )


def _blank(num_pages, page_size, rows, fill):
    shape = (num_pages, page_size, *rows.shape[1:])
    return torch.full(shape, fill, dtype=torch.float32, device=rows.device).to(rows.dtype)


def strided(x: torch.Tensor, axis: int = 0, gap: int = 8, fill: float = float("nan")) -> torch.Tensor:
    """The values of x as a view of a larger buffer with `gap` elements of `fill` after each step along `axis`.

    The last dimension stays contiguous unless it is `axis`, which then has stride gap + 1.
    """
    axis %= x.dim()
    last = axis == x.dim() - 1
    shape = list(x.shape)
    if last:
        buffer = torch.full((*shape, gap + 1), fill, dtype=torch.float32, device=x.device).to(x.dtype)
        view = buffer[..., 0]
    else:
        inner = torch.Size(shape[axis + 1 :]).numel()
        buffer = torch.full((*shape[: axis + 1], inner + gap), fill, dtype=torch.float32, device=x.device).to(x.dtype)
        view = buffer[..., :inner].unflatten(-1, shape[axis + 1 :])
    view.copy_(x)
    return view


def random_mask(qo_lens, kv_lens, density: float = 0.7, device="cpu") -> torch.Tensor:
    """bool [sum of qo_len * kv_len]: the row-major masks of all requests one after another; True keeps a key.

    Every second request with keys has a query row that keeps none.
    """
    masks = []
    for i, (qo, kv) in enumerate(zip(qo_lens, kv_lens)):
        mask = torch.rand(qo, kv, dtype=torch.float32, device="cpu") < density
        if i % 2 == 0 and qo:
            mask[qo // 2] = False
        masks.append(mask.flatten())
    return torch.cat(masks).to(device) if masks else torch.zeros(0, dtype=torch.bool, device=device)


def pack_mask(mask: torch.Tensor, qo_lens, kv_lens) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a flat bool mask to bits, first element in the lowest bit, each request from a byte of its own.

    Returns uint8 [bytes] and the int32 [batch + 1] offsets of requests in bytes.
    """
    sizes = [qo * kv for qo, kv in zip(qo_lens, kv_lens)]
    weights = 2 ** torch.arange(8, device="cpu")
    packed = []
    for part in mask.cpu().split(sizes):
        padded = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.int64, device="cpu")
        padded[: part.numel()] = part
        packed.append((padded.view(-1, 8) * weights).sum(1))
    bits = torch.cat(packed).to(torch.uint8) if packed else torch.zeros(0, dtype=torch.uint8, device="cpu")
    return bits.to(mask.device), indptr([p.numel() for p in packed], mask.device)


class Guarded:
    """An undefined output buffer between canaries: see `flashinfer.testing.guard`.

    guarded = Guarded((4, 8), torch.float16, device); run(out=guarded.out); guarded.check()
    """

    def __init__(self, shape, dtype: torch.dtype, device="cpu"):
        self.out = guard.guarded(shape, dtype, device)

    def check(self) -> None:
        """Raise AssertionError if anything was written beside `out`."""
        guard.check()
