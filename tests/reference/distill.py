"""Kullback-Leibler divergence of the student's softmax from the teacher's, term by term."""

import math


def softmax(logits):
    exponentials = [math.exp(value - max(logits)) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def distillation(student_rows, teacher_rows):
    total = 0.0
    for student_logits, teacher_logits in zip(student_rows, teacher_rows, strict=True):
        student, teacher = softmax(student_logits), softmax(teacher_logits)
        for p, q in zip(student, teacher, strict=True):
            total += q * math.log(q / p)
    return total / len(student_rows)
