"""Plans for a model on several devices: splits that fit, bytes sent, best time of a step."""
