"""BigBird: blocks that see their neighbors, random blocks and global positions (2007.14062)."""

from dataclasses import replace
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from protlm.attention.base import Attention, Context, odd
from protlm.attention.ops.block_sparse import (
    FixedBlocks,
    SeenKeys,
    SelectedBlocksAttention,
    draw_blocks,
    hash_keys,
)
from protlm.attention.ops.blocks import from_blocks, softmax_in_blocks, to_blocks
from protlm.attention.ops.global_tokens import GlobalTokens, check_residue_numbers, global_mask
from protlm.attention.ops.numerics import zero_padding
from protlm.config.fields import at_least
from protlm.system.errors import OptionError


@final
class BigBird(Attention):
    """Softmax over neighboring blocks, random blocks and global positions.

        out_i = Σ_{j ∈ A(i)} exp(q_i·k_j / √K) v_j / Σ_{j ∈ A(i)} exp(q_i·k_j / √K)

    Positions are cut into blocks of b = `block_size`. A(i) is every position where i is global.
    Elsewhere it is the union, each position once, of the position's own block with ⌊w/2⌋ blocks on
    either side (w = `window_blocks`), of r = `random_blocks` random ones, drawn for this block and
    head, and of the global positions (Zaheer et al., arXiv 2007.14062, section 2 and appendix D).
    ITC, the default, makes the blocks at both ends global; ETC is `global_blocks=0,
    random_blocks=0` and some `num_global`. `global_positions` adds residues by their numbers; the
    docstring of `Longformer` shows how to find those of a motif.

    A sample's n blocks end with its last true position, regardless of its padding. Random blocks
    are distinct, exclude those of the window and the global ones, and are all the remaining blocks
    where there are fewer than r. They are a hash of (seed, head, block, n): the same on every call.

    The causal mode is an addition; the paper has none. There i sees its own block up to itself, the
    w - 1 blocks before it, the global positions before it (first blocks, first tokens and residues;
    there are no last blocks), and r random blocks among the other earlier ones, a hash of (seed,
    head, block). A global position sees everything before it. No output depends on what follows,
    nor on how much follows.

    Deviations from the paper: ETC's global tokens are the first of the sequence, not additional
    ones, without relative positions, because the model provides tokens and positions. Random blocks
    never repeat other blocks; the released code lets them, and counts those twice. Where padding
    comes first, blocks are counted from the first position, global tokens from the first true one.
    """

    # The 2 block_size global_blocks + num_global global positions count as keys and as queries.
    rounded_by_autocast: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "L (block_size (window_blocks + random_blocks + 4 global_blocks) + 2 num_global) K"
    )
    advice: ClassVar[str] = "long proteins with exact local weights, and random long-range links"
    hash_key: Tensor

    def __init__(
        self,
        *,
        num_heads: int,
        block_size: Annotated[int, at_least(1)] = 64,
        window_blocks: Annotated[int, odd(1)] = 3,
        global_blocks: Annotated[int, at_least(0)] = 1,
        num_global: Annotated[int, at_least(0)] = 0,
        random_blocks: Annotated[int, at_least(0)] = 3,
        global_positions: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        residues = check_residue_numbers(global_positions)
        if not (window_blocks > 1 or global_blocks or num_global or random_blocks or residues):
            raise OptionError(
                lambda at: (
                    f"{at}window_blocks=1 without global positions and random blocks leaves every "
                    f"block to itself; try {at}window_blocks=3"
                )
            )
        self.block_size = block_size
        self.window_blocks = window_blocks
        self.global_blocks = global_blocks
        self.num_global = num_global
        self.random_blocks = random_blocks
        self.residues = residues
        self.register_buffer("hash_key", hash_keys(seed, num_heads))

    def mix(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLC: Tensor, context: Context) -> Tensor:
        mask_BL, causal = context.mask_BL, context.causal
        q_BHLK, k_BHLK, v_BHLC = (zero_padding(x, mask_BL) for x in (q_BHLK, k_BHLK, v_BHLC))
        # Blocks up to the last true position.
        number_L = torch.arange(1, mask_BL.shape[1] + 1, device=mask_BL.device)
        num_blocks_B = -(-(mask_BL * number_L).amax(dim=1) // self.block_size)
        tokens = self._global_tokens(mask_BL, num_blocks_B, causal=causal)
        out = SelectedBlocksAttention.apply(
            *(to_blocks(x, self.block_size) for x in (q_BHLK, k_BHLK, v_BHLC)),
            tokens.take(k_BHLK),
            tokens.take(v_BHLC),
            self._selection(mask_BL, tokens, num_blocks_B, causal=causal),
        )
        assert isinstance(out, Tensor)
        out_BHLC = from_blocks(out, mask_BL.shape[1])
        # Causal positions at the start see only global ones, as all others in their blocks do.
        if (self.residues or not causal) and tokens.position_BP.shape[1] > 0:
            rows_BH1PC = softmax_in_blocks(
                tokens.take(q_BHLK)[:, :, None],
                k_BHLK[:, :, None],
                v_BHLC[:, :, None],
                tokens.visible(mask_BL, causal=causal)[:, None, None],
            )
            out_BHLC = tokens.put(out_BHLC, rows_BH1PC.squeeze(2))
        return zero_padding(out_BHLC, mask_BL)

    def _fixed_blocks(self, *, causal: bool) -> FixedBlocks:
        first, window = self.global_blocks, self.window_blocks
        if causal:
            return FixedBlocks(first=first, last=0, before=window - 1, after=0)
        return FixedBlocks(first=first, last=first, before=window // 2, after=window // 2)

    def _global_tokens(
        self, mask_BL: Tensor, num_blocks_B: Tensor, *, causal: bool
    ) -> GlobalTokens:
        """Finds the first positions, the chosen residues, and the blocks at both ends."""
        fixed = self._fixed_blocks(causal=causal)
        block_L = torch.arange(mask_BL.shape[1], device=mask_BL.device) // self.block_size
        is_end_BL = (block_L < fixed.first) | (block_L >= num_blocks_B[:, None] - fixed.last)
        is_global_BL = global_mask(mask_BL, self.num_global, self.residues) | (is_end_BL & mask_BL)
        ends = (fixed.first + fixed.last) * self.block_size
        return GlobalTokens.of(is_global_BL, ends + self.num_global + len(self.residues))

    def _selection(
        self, mask_BL: Tensor, tokens: GlobalTokens, num_blocks_B: Tensor, *, causal: bool
    ) -> SeenKeys:
        """Selects what every block sees, each position once: global ones not in their blocks."""
        length = mask_BL.shape[1]
        place_L = torch.arange(1, length + 1, device=mask_BL.device)
        local_BL = (mask_BL & ~tokens.is_global_BL) * place_L
        local_B1SM1 = to_blocks(local_BL[:, None, :, None], self.block_size)
        _, _, number, size, _ = local_B1SM1.shape
        last_place = torch.arange(1, number * size + 1, device=mask_BL.device).view(number, size)
        return SeenKeys(
            numbers=self._numbers(num_blocks_B, number, causal=causal),
            place_BSM=local_B1SM1[:, 0, ..., 0],
            global_place_BP=tokens.exists_BP * (tokens.position_BP + 1),
            last_place=last_place if causal else torch.full_like(last_place[:, :1], length),
        )

    def _numbers(self, num_blocks_B: Tensor, number: int, *, causal: bool) -> Tensor:
        """Returns the blocks that each block sees, its window first: (B, H, S, w + r), or -1."""
        fixed = self._fixed_blocks(causal=causal)
        row_S = torch.arange(number, device=num_blocks_B.device)
        window = row_S[:, None] + torch.arange(-fixed.before, fixed.after + 1, device=row_S.device)
        window = window.where((window >= 0) & (window < number), -1)
        # A causal block must not depend on the number of blocks after it.
        num_blocks_BS = num_blocks_B[:, None].expand(-1, number)
        if causal:
            num_blocks_BS = (row_S + 1).expand_as(num_blocks_BS)
        # Blocks full of global tokens are seen anyway.
        fixed = replace(fixed, first=max(fixed.first, self.num_global // self.block_size))
        drawn = draw_blocks(self.hash_key, num_blocks_BS, fixed, min(self.random_blocks, number))
        return torch.cat([window.expand(*drawn.shape[:3], -1), drawn], dim=-1)
