"""Pure functions: scores of answers, and the statistics that say what they are worth."""
