"""What engines do between two steps: a pool of one-token pages, tables in fixed buffers, plans from what lies there."""

import math

import torch

from flashinfer.testing import generate
from tests.ops.attention.cases import workspace

HEADS, DIM = (4, 2), 64
SCALE = 1 / math.sqrt(DIM)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Pool:
    """A cache of one-token pages that every step is put into, and the tables an engine keeps for all its wrappers."""

    def __init__(self, device, batch, slots=300, dtype=torch.float16, rows=64):
        self.device, self.batch = device, batch
        self.kv = torch.zeros(slots, 2, 1, HEADS[1], DIM, dtype=dtype, device=device)
        self.q = torch.zeros(rows, HEADS[0], DIM, dtype=dtype, device=device)
        self.qo_indptr, self.kv_indptr = (torch.zeros(batch + 1, dtype=torch.int32, device=device) for _ in range(2))
        self.indices = torch.zeros(slots, dtype=torch.int32, device=device)
        self.last = torch.ones(batch, dtype=torch.int32, device=device)
        self.mask = torch.zeros(4096, dtype=torch.uint8, device=device)
        self.mask_indptr = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.workspace = workspace(device)

    def step(self, q_lens, kv_lens):
        """A batch, and its page table; keys and values are in the pool."""
        x = generate.ragged_batch(q_lens, kv_lens, *HEADS, DIM, dtype=self.q.dtype, device=self.device)
        paged = generate.paged(x, 1, spare=2)
        self.kv.fill_(float("nan"))
        self.kv[: len(paged.kv_cache)] = paged.kv_cache
        self.q[: len(x.q)] = x.q
        return x, paged

    @property
    def pair(self):
        return self.kv[:, 0], self.kv[:, 1]


def packed(masks, device):
    """Packed bits of masks, and where those of each begin, on the host."""
    import numpy as np

    rows = [np.packbits(mask.flatten().cpu().numpy(), bitorder="little") for mask in masks]
    begins = ints([0, *np.cumsum([len(row) for row in rows]).tolist()])
    return torch.from_numpy(np.concatenate(rows)).to(device), begins


def write_tables(wrapper, x, paged, masks=None):
    """Put a batch into the fixed buffers of a prefill wrapper."""
    wrapper._qo_indptr_buf.copy_(x.qo_indptr, non_blocking=True)
    wrapper._paged_kv_indptr_buf.copy_(paged.indptr, non_blocking=True)
    wrapper._paged_kv_last_page_len_buf.copy_(paged.last_page_len, non_blocking=True)
    wrapper._paged_kv_indices_buf[: len(paged.indices)].copy_(paged.indices, non_blocking=True)
    if masks is not None:
        bits, begins = masks
        wrapper._custom_mask_buf[: len(bits)].copy_(bits, non_blocking=True)
        wrapper._mask_indptr_buf.copy_(begins, non_blocking=True)


def prefill_arguments(wrapper, q_lens, kv_lens, count=20, /, **changes):
    """What an engine hands to the prefill module: workspaces, tensors on the host, sizes, flags."""
    named = dict(
        float_workspace=wrapper._float_workspace_buffer, int_workspace=wrapper._int_workspace_buffer,
        pinned=wrapper._pin_memory_int_workspace_buffer, qo_indptr=generate.indptr(q_lens),
        kv_indptr=generate.indptr(kv_lens), kv_lens=ints(kv_lens), total_num_rows=sum(q_lens), batch_size=len(q_lens),
        num_qo_heads=HEADS[0], num_kv_heads=HEADS[1], page_size=1, enable_cuda_graph=wrapper.is_cuda_graph_enabled,
        head_dim_qk=DIM, head_dim_vo=DIM, causal=False, window_left=-1, fixed_split_size=-1, disable_split_kv=False,
        num_colocated_ctas=0, uniform_q_len=0,
    )  # fmt: skip
    assert changes.keys() <= named.keys()
    return tuple((named | changes).values())[:count]


def decode_arguments(wrapper, kv_lens):
    """What an engine hands to the decode module without tensor cores."""
    empty = torch.empty(0, dtype=torch.float16)
    return (
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        generate.indptr(kv_lens), len(kv_lens), *HEADS, 1, wrapper.is_cuda_graph_enabled, -1, 0.0, DIM, DIM, empty,
        empty,
    )  # fmt: skip


def latent_arguments(wrapper, q_lens, entries, kv_lens, heads, ckv, causal=False):
    """What an engine hands to the module of latent attention; `entries` of the page table for each request."""
    return (
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        generate.indptr(q_lens), generate.indptr(entries), ints(kv_lens), heads, ckv, causal,
    )  # fmt: skip
