"""Finding patterns in graphs: anchored backtracking search, a fusion's rules, and legality. Floor 2."""
