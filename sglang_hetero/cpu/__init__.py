"""The CPU reference platform: what SGLang 0.5.23 needs to run a hybrid model on a plain CPU (docs/cpu.md)."""
