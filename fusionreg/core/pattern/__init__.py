"""Pattern language: text to a graph of steps (parse), then to one problem's reference graph (instantiate). Floor 2."""
