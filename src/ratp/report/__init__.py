"""Tables, plots and pages made only from what runs left on disk."""
