"""The parts of scripts/demo: servers, conversations, meters, the verdict, the report."""
