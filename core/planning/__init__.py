"""Plans of how a model may be split over devices: what fits, what is sent, and how long a step takes at best."""
