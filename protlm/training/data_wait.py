"""The time that training waits for its data."""

import time

from pytorch_lightning.profilers import Profiler


class DataWait(Profiler):
    """Measures the seconds in which the training loop waits for its next batch.

    Lightning reports the start and end of each fetch of a batch, and of many other actions, to its
    profiler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._since = 0.0

    def start(self, action_name: str) -> None:
        """Records the start of a fetch."""
        if action_name.endswith(_FETCH):
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Adds the time of a fetch."""
        if action_name.endswith(_FETCH):
            self.seconds += time.perf_counter() - self._since


_FETCH = ".train_dataloader_next"
