"""Clock, statistics, bandwidth and checks over the engine. Never prints."""
