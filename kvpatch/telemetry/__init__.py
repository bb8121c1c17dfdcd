"""What a process publishes about itself, and how it is read; imports nothing of vLLM."""
