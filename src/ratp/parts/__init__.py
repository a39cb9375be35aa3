"""The mathematics the methods share: tensors in, tensors out."""
