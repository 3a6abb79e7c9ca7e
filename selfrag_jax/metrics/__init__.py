"""Pure functions: scores of answers, retrieval and citations, and the statistics that say what they are worth."""
