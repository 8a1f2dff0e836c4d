"""How attention_kernels.py measures: the sheet, the problems and their float64 reference, the clock, the verdicts."""
