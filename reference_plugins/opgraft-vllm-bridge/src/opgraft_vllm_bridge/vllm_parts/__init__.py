"""Modules of vLLM whose names have another form in opgraft than plugins know them by."""
