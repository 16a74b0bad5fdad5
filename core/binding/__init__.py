"""From an op class to the class whose instances run the chosen kernel."""
