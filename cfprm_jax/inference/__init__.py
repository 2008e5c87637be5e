"""Using a trained PRM: from questions and steps to scores."""
