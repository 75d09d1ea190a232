"""MLflow behind a small Protocol: a sink. Records are on disk first; nothing measured waits for a server."""

from evalq.tracking.study import (
    MlflowTracker,
    NullTracker,
    Outcome,
    Study,
    Tracker,
    log_study,
    open_tracker,
)

__all__ = ["MlflowTracker", "NullTracker", "Outcome", "Study", "Tracker", "log_study", "open_tracker"]
