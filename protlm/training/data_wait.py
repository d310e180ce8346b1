"""How long training waits for its data."""

import time

from pytorch_lightning.profilers import Profiler


class DataWait(Profiler):
    """Adds up the seconds in which the training loop waits for its next batch.

    Lightning tells its profiler of each fetch of a batch, and of much else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._since = 0.0

    def start(self, action_name: str) -> None:
        """Notes the time when a fetch begins."""
        if action_name.endswith(_FETCH):
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Adds the fetch that is over."""
        if action_name.endswith(_FETCH):
            self.seconds += time.perf_counter() - self._since


_FETCH = ".train_dataloader_next"
