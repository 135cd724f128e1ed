"""Why a run failed, or makes no progress, from what its ranks left behind or are seen doing."""
