"""What a run shows: metrics, progress, tables, plots and pages."""
