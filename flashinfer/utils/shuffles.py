"""Packed FP4, and the order of rows that TensorRT-LLM's generated kernels want."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require


class FP4Tensor:
    """Packed e2m1 codes with their scale factors, as attention writes a quantised result.

    Parameters
    ----------
    data : torch.Tensor
        uint8 [..., n / 2]: two codes a byte, the first in the low half.
    scale : torch.Tensor
        float8_e4m3fn factors, in the 128x4 layout: the first dimension a multiple of 128, the second of 4.
    scale_start_index : int
        The row of `scale` that belongs to the first row of `data`.
    original_shape : tuple of int, optional
        Of the values: that of `data` with the last dimension doubled, which is the default.

    Raises
    ------
    ValueError
        A dtype, shape or index other than the above.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: tuple[int, ...] | None = None,
    ):
        require(data.dtype == torch.uint8, "data", data.dtype, "uint8")
        require(scale.dtype == torch.float8_e4m3fn, "scale", scale.dtype, "float8_e4m3fn")
        tiled = scale.dim() == 2 and scale.shape[0] % 128 == 0 and scale.shape[1] % 4 == 0
        require(tiled, "scale", tuple(scale.shape), "[a multiple of 128, a multiple of 4]")
        rows = data.shape[0]
        fits = 0 <= scale_start_index and scale_start_index + rows <= scale.shape[0]
        require(fits, "scale_start_index", scale_start_index, f"0 to {scale.shape[0] - rows}: {rows} rows of data")
        shape = (*data.shape[:-1], 2 * data.shape[-1])
        given = shape if original_shape is None else tuple(original_shape)
        require(given == shape, "original_shape", given, f"{shape}, twice the last dimension of data")
        self.data = data
        self.scale = scale
        self.scale_start_index = scale_start_index
        self.original_shape = given


def get_shuffle_matrix_a_row_indices(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """The order in which TensorRT-LLM's generated kernels want the rows of a weight.

    Within each block of rows, 32 if `epilogue_tile_m` is a multiple of 128 and else 16, row r goes to
    8 (r mod (block / 8)) + r div (block / 8).

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, .]; rows a multiple of the block.
    epilogue_tile_m : int
        Rows that the kernel's epilogue treats at once.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the CPU: row i of the shuffled weight is this row of `input_tensor`.

    Raises
    ------
    ValueError
        A shape other than the above.
    """
    require(input_tensor.dim() == 2, "input_tensor", tuple(input_tensor.shape), "two dimensions")
    block = get_shuffle_block_size(epilogue_tile_m)
    rows = input_tensor.shape[0]
    require(rows % block == 0, "input_tensor", tuple(input_tensor.shape), f"a multiple of {block} rows")
    # [8, block / 8] read by columns: of the destinations 0, 1, 2, ... the sources.
    order = torch.arange(block, dtype=torch.int64, device="cpu").view(8, block // 8).T.flatten()
    return (torch.arange(0, rows, block, dtype=torch.int64, device="cpu")[:, None] + order).flatten()


def get_shuffle_matrix_sf_a_row_indices(
    input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16
) -> torch.Tensor:
    """The order of the rows of a weight's scale factors: that of the weight's rows.

    Parameters
    ----------
    input_tensor : torch.Tensor
        [rows, factors]; rows a multiple of 128, factors one of 4.
    epilogue_tile_m : int
        As in `get_shuffle_matrix_a_row_indices`.
    num_elts_per_sf : int
        Elements to a factor, 16 or 32. It does not change the order of rows.

    Returns
    -------
    torch.Tensor
        int64 [rows], on the CPU.

    Raises
    ------
    ValueError
        A shape or number other than the above.
    """
    require(num_elts_per_sf in (16, 32), "num_elts_per_sf", num_elts_per_sf, "16, 32")
    shape = tuple(input_tensor.shape)
    require(len(shape) == 2 and shape[0] % 128 == 0 and shape[1] % 4 == 0, "input_tensor", shape,
            "[a multiple of 128, a multiple of 4]")  # fmt: skip
    return get_shuffle_matrix_a_row_indices(input_tensor, epilogue_tile_m)


def get_shuffle_block_size(epilogue_tile_m: int) -> int:
    """Rows of a block of `get_shuffle_matrix_a_row_indices`: 32 if `epilogue_tile_m` is a multiple of 128, else 16."""
    return 32 if epilogue_tile_m % 128 == 0 else 16
