"""Collectives of a group of ranks together with what follows or precedes them: functional forms of other ops."""
