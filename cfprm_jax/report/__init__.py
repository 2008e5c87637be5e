"""What a Best-of-N evaluation writes: results.json, tables, plot and page."""
