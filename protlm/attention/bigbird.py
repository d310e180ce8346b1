"""BigBird: blocks that see their neighbours, random blocks and global positions (2007.14062)."""

from dataclasses import replace
from typing import ClassVar, final

import torch
from torch import Tensor

from protlm.attention.base import Attention
from protlm.attention.blocks import from_blocks, softmax_in_blocks, to_blocks
from protlm.attention.masking import zero_padding
from protlm.attention.random_blocks import FixedBlocks, draw_blocks, hash_keys
from protlm.attention.selected_blocks import SelectedBlocksAttention, Selection
from protlm.errors import UserError


@final
class BigBird(Attention):
    """Softmax over neighbouring blocks, random blocks and global positions.

        out_i = Σ_{j ∈ A(i)} exp(q_i·k_j / √K) v_j / Σ_{j ∈ A(i)} exp(q_i·k_j / √K)

    Positions are cut into blocks of b. A(i) is every position where i is global. Elsewhere it is
    the union, each position once, of the own block with ⌊w/2⌋ blocks on either side, of r random
    blocks, drawn for this block and head, and of the global positions (Zaheer et al., arXiv
    2007.14062, section 2 and appendix D). ITC, the default, makes the blocks at both ends global;
    ETC is `global_blocks=0, random_blocks=0` and some `num_global`.

    A sample's n blocks end with its last true position, however far it is padded. Random blocks are
    distinct, never those of the window or the global ones, and all that are left where there are
    fewer than r. They are a hash of (seed, head, block, n): the same on every call.

    Causal (ours, the paper has none): i sees its own block up to itself, the w - 1 blocks before
    it, the global positions before it (first blocks and first tokens; there are no last blocks),
    and r random blocks among the other earlier ones, a hash of (seed, head, block). No output
    depends on what follows, nor on how much follows.

    Deviations from the paper: ETC's global tokens are the first of the sequence, not additional
    ones, without relative positions, because tokens and positions are the model's; and random
    blocks never repeat others, which the released code lets them do, counting those twice. Where
    padding comes first, blocks are counted from the first position, global tokens from the first
    true one.

    Args:
        num_heads: heads, each with random blocks of its own.
        block_size: positions b in a block.
        window_blocks: blocks w of the window, the own one included; odd.
        global_blocks: blocks at either end whose positions see all and are seen by all.
        num_global: true positions at the start that see all and are seen by all; `<cls>` first.
        random_blocks: random blocks r that a block sees.
        seed: what the random blocks are drawn from.

    Raises:
        UserError: a number out of range, an even window, or blocks that see only themselves.
    """

    supports_bidirectional = True
    supports_causal = True
    cost: ClassVar[str] = (
        "L (block_size (window_blocks + 2 global_blocks + random_blocks) + num_global) K"
    )
    advice: ClassVar[str] = "long proteins with exact local weights, and hops to anywhere"
    hash_key: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        block_size: int = 64,
        window_blocks: int = 3,
        global_blocks: int = 1,
        num_global: int = 0,
        random_blocks: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _refuse_below("block_size", block_size, 1)
        _refuse_below("global_blocks", global_blocks, 0)
        _refuse_below("num_global", num_global, 0)
        _refuse_below("random_blocks", random_blocks, 0)
        if window_blocks < 1 or window_blocks % 2 == 0:
            raise UserError(
                f"attention.window_blocks={window_blocks} must be odd: a block and as many on "
                "either side; try attention.window_blocks=3"
            )
        if window_blocks == 1 and global_blocks == num_global == random_blocks == 0:
            raise UserError(
                "attention.window_blocks=1 without global positions and random blocks leaves "
                "every block to itself; try attention.window_blocks=3"
            )
        self.block_size = block_size
        self.window_blocks = window_blocks
        self.global_blocks = global_blocks
        self.num_global = num_global
        self.random_blocks = random_blocks
        self.register_buffer("hash_key", hash_keys(seed, num_heads))

    def forward(
        self,
        q_BHLK: Tensor,
        k_BHLK: Tensor,
        v_BHLC: Tensor,
        *,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        causal: bool,
    ) -> Tensor:
        """See `Attention.forward`."""
        q_BHLK, k_BHLK, v_BHLC = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC))
        num_blocks_B = self._num_blocks(mask_BL)
        is_global_BL = self._is_global(mask_BL, num_blocks_B, causal=causal)
        global_BP = self._global_positions(is_global_BL, causal=causal)
        out = SelectedBlocksAttention.apply(
            *(to_blocks(x, self.block_size) for x in (q_BHLK, k_BHLK, v_BHLC)),
            _at(k_BHLK, global_BP),
            _at(v_BHLC, global_BP),
            self._selection(mask_BL, is_global_BL, global_BP, num_blocks_B, causal=causal),
        )
        assert isinstance(out, Tensor)
        out_BHLC = from_blocks(out, mask_BL.shape[1])
        # What a causal global position sees is before it, and all of that is global.
        if not causal and global_BP.shape[1] > 0:
            rows_BHLC = _rows_that_see_all(q_BHLK, k_BHLK, v_BHLC, mask_BL, global_BP)
            out_BHLC = torch.where(is_global_BL[:, None, :, None], rows_BHLC, out_BHLC)
        return zero_padding(out_BHLC, mask_BL)

    def _fixed_blocks(self, *, causal: bool) -> FixedBlocks:
        first, window = self.global_blocks, self.window_blocks
        if causal:
            return FixedBlocks(first=first, last=0, before=window - 1, after=0)
        return FixedBlocks(first=first, last=first, before=window // 2, after=window // 2)

    def _num_blocks(self, mask_BL: Tensor) -> Tensor:
        """The number of blocks up to the last true position."""
        number_L = torch.arange(1, mask_BL.shape[1] + 1, device=mask_BL.device)
        return ((mask_BL * number_L).amax(dim=1) + self.block_size - 1) // self.block_size

    def _is_global(self, mask_BL: Tensor, num_blocks_B: Tensor, *, causal: bool) -> Tensor:
        fixed = self._fixed_blocks(causal=causal)
        block_L = torch.arange(mask_BL.shape[1], device=mask_BL.device) // self.block_size
        is_first_BL = (mask_BL.cumsum(dim=1) <= self.num_global) | (block_L < fixed.first)
        is_last_BL = block_L >= num_blocks_B[:, None] - fixed.last
        return (is_first_BL | is_last_BL) & mask_BL

    def _global_positions(self, is_global_BL: Tensor, *, causal: bool) -> Tensor:
        """The global positions, all different; a sample that has fewer is filled up with others."""
        fixed = self._fixed_blocks(causal=causal)
        number = (fixed.first + fixed.last) * self.block_size + self.num_global
        # A stable sort, because other orders would make sums differ between two runs.
        order_BL = is_global_BL.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        return order_BL[:, :number]

    def _selection(
        self,
        mask_BL: Tensor,
        is_global_BL: Tensor,
        global_BP: Tensor,
        num_blocks_B: Tensor,
        *,
        causal: bool,
    ) -> Selection:
        """What every block sees, each position once: a global one is left out of its block."""
        length = mask_BL.shape[1]
        place_L = torch.arange(1, length + 1, device=mask_BL.device)
        local_BL = (mask_BL & ~is_global_BL) * place_L
        local_B1SM1 = to_blocks(local_BL[:, None, :, None], self.block_size)
        _, _, number, size, _ = local_B1SM1.shape
        last_place = torch.arange(1, number * size + 1, device=mask_BL.device).view(number, size)
        return Selection(
            numbers=self._numbers(num_blocks_B, number, causal=causal),
            place_BSM=local_B1SM1[:, 0, ..., 0],
            global_place_BP=is_global_BL.gather(1, global_BP) * (global_BP + 1),
            last_place=last_place if causal else torch.full_like(last_place[:, :1], length),
        )

    def _numbers(self, num_blocks_B: Tensor, number: int, *, causal: bool) -> Tensor:
        """What blocks each block sees, those of its window first: (B, H, S, w + r), -1 for none."""
        fixed = self._fixed_blocks(causal=causal)
        row_S = torch.arange(number, device=num_blocks_B.device)
        offsets = torch.arange(-fixed.before, fixed.after + 1, device=row_S.device)
        window = row_S[:, None] + offsets
        window = window.where((window >= 0) & (window < number), -1)
        # A causal block must not know how many there are behind it.
        num_blocks_BS = num_blocks_B[:, None].expand(-1, number)
        if causal:
            num_blocks_BS = (row_S + 1).expand_as(num_blocks_BS)
        # Blocks full of global tokens are seen anyway.
        fixed = replace(fixed, first=max(fixed.first, self.num_global // self.block_size))
        drawn = draw_blocks(self.hash_key, num_blocks_BS, fixed, min(self.random_blocks, number))
        return torch.cat([window.expand(*drawn.shape[:3], -1), drawn], dim=-1)


def _rows_that_see_all(
    q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, mask_BL: Tensor, rows_BP: Tensor
) -> Tensor:
    """Softmax over all true positions for some rows, BHLC; 0 in the others."""
    out_BH1PC = softmax_in_blocks(
        _at(q_BHLK, rows_BP)[:, :, None],
        k_BHLK[:, :, None],
        v_BHLC[:, :, None],
        mask_BL[:, None, None, None],
    )
    out_BHPC = out_BH1PC.squeeze(2)
    index_BHPC = rows_BP[:, None, :, None].expand(out_BHPC.shape)
    return torch.zeros_like(v_BHLC).scatter(2, index_BHPC, out_BHPC)


def _at(x_BHLK: Tensor, positions_BP: Tensor) -> Tensor:
    """What stands at some positions, BHPK."""
    _, heads, _, width = x_BHLK.shape
    return x_BHLK.gather(2, positions_BP[:, None, :, None].expand(-1, heads, -1, width))


def _refuse_below(option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(
            f"attention.{option}={value} must be {least} or more; try attention.{option}={least}"
        )
