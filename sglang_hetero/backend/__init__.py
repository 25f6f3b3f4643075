"""The transfer inside SGLang: the only package that imports SGLang, beside the CPU reference platform.

releases/ asks the installed SGLang for its number.
"""
