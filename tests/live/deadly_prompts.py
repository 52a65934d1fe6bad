"""The first tokens of prompts that bring out the faults of `deadly_worker`."""

RAISES, IS_KILLED = [13] * 5, [17] * 5
