"""What a model still knows after the hand-over: the recall task."""

from sglang_hetero.accuracy.recall import Question, questions, score

__all__ = ["Question", "questions", "score"]
