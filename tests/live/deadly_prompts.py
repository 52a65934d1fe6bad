"""The first tokens of prompts that cause the faults of `deadly_worker`."""

RAISES, IS_KILLED = [13] * 5, [17] * 5
