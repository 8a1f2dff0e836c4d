"""Steps that are recorded into device graphs and replayed."""
