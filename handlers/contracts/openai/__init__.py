"""OpenAI: routes and errors; vLLM itself reads and writes the bodies."""
