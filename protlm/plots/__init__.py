"""Figures of losses, attention maps, contacts and the effects of substitutions.

Each function returns a matplotlib figure without a window or global state, which can be drawn on a
machine without a screen, shown in a notebook, and saved.
"""

from protlm.plots.contacts import contact_figure
from protlm.plots.loss import loss_curve
from protlm.plots.maps import attention_grid
from protlm.plots.saving import save_figure
from protlm.plots.scan import scan_figure

__all__ = ["attention_grid", "contact_figure", "loss_curve", "save_figure", "scan_figure"]
