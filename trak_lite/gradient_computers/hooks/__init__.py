"""Implementation of :class:`HookGradientComputer`: plans, gradient rules, and the gradient pass."""
