"""Whether two answers are the same: extraction, rules, and the processes that compare."""
