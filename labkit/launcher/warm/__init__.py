"""Makes launches quicker: torchrun and its ranks are forks of the supervisor, which has imported torch. From a
session's second run on, the supervisor is itself a fork of a process that has done so already."""
