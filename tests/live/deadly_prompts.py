"""The first tokens of deadly prompts. `engine_workers.DeadlyWorker` fails at these prompts."""

RAISES, IS_KILLED = [13] * 5, [17] * 5
