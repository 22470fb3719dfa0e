"""The machinery of :class:`HookGradientComputer`: a plan of where parameters are used, rules, and one pass."""
