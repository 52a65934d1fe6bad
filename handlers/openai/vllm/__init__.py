"""vLLM's OpenAI front end in this process. The modules of this folder import vLLM."""
