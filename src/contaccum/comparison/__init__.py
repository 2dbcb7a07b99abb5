"""From a table to a verdict: the same data, budget and judgement for several methods, and one page that says which to use."""
