"""Step labels from rollouts, from a search tree, and from a judge. Methods are generators that know no engine."""
