"""The first tokens of prompts that cause the faults of `engine_workers.DeadlyWorker`."""

RAISES, IS_KILLED = [13] * 5, [17] * 5
