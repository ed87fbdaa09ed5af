"""Choosing among overlapping matches: costs, exact packing, plans. Floor 4."""
