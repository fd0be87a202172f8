"""Top-k in torch: a stable sort."""

import torch

from flashinfer._core.implementation import Implementation


def run(problem, config, x, k, starts, lengths, places, outputs):
    rows, columns = x.shape
    at = torch.arange(columns, device=x.device)
    first = torch.zeros(rows, dtype=torch.int64, device=x.device) if starts is None else starts.long().clamp(0, columns)
    length = columns - first if lengths is None else lengths.long().clamp(min=0).minimum(columns - first)
    local = at + first[:, None]
    window = x.gather(1, local.clamp(max=columns - 1))
    outside = at >= length[:, None]
    values = window.float().where(window != 0, 0)
    if problem.last:
        values, outside = values.flip(-1), outside.flip(-1)
    # NaN sorts before all else; what is outside the window comes last, whatever it holds.
    order = values.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(1, outside.gather(1, order).sort(dim=-1, stable=True).indices)[:, :k]
    if problem.last:
        order = columns - 1 - order
    none = at[: order.shape[1]] >= length[:, None]
    if problem.result != "sorted":
        order, none = order.masked_fill(none, columns).sort(dim=-1).values, none
    order = order.masked_fill(none, 0)
    if problem.result in ("values", "sorted"):
        out_value, out_index = outputs
        out_value.copy_(window.gather(1, order))
        out_index.copy_(order)
        return
    width = order.shape[1]
    if problem.result == "columns":
        out_value, out_index = outputs
        out_index.fill_(-1)
        out_index[:, :width] = order.masked_fill(none, -1)
        if out_value is not None:
            out_value.zero_()
            out_value[:, :width] = window.gather(1, order).masked_fill(none, 0)
        return
    out, raw = outputs
    out.fill_(-1)
    result = _slots(problem, order, starts, places) if problem.result == "pages" else order + places[0].long()[:, None]
    out[:, :width] = result.masked_fill(none, -1).to(out.dtype)
    if raw is not None:
        raw.fill_(-1)
        raw[:, :width] = order.masked_fill(none, -1).to(raw.dtype)


def _slots(problem, order, starts, places):
    """Where the page table puts columns; -1 where it ends or has no page."""
    page_table, row_to_batch, page_starts, page_size = places
    start = page_starts if problem.page_starts else starts
    table = page_table[: len(order)] if row_to_batch is None else page_table[row_to_batch.long()]
    page = order // page_size if start is None else order // page_size + start.long()[:, None]
    inside = (page >= 0) & (page < table.shape[1])
    if not table.shape[1]:
        return torch.full_like(order, -1)
    entry = table.long().gather(1, page.where(inside, 0))
    return (entry * page_size + order % page_size).where(inside & (entry >= 0), -1)


IMPLEMENTATION = Implementation(run)
