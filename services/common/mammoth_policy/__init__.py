"""Decide: the scheduling policies of both stages, pure, shared by the stages that act on them and by whoever predicts them."""
