"""A checkpoint's configuration as typed fields, whether it is a parsed config.json or SGLang's object."""

from collections.abc import Mapping

from sglang_hetero.errors import ManifestError

from . import limits
from .checks import shorten

_SHOWN = 80
"""Characters of a family's name that a message shows."""
_REMEDY = "use the unmodified config.json that belongs to the checkpoint"


class Fields:
    """The text part of a model's configuration.

    config: the mapping in a config.json, or an object with the same names as attributes, such as a `PretrainedConfig`
    of transformers or SGLang. Multimodal checkpoints nest what matters here in `text_config`; the outer part then only
    answers for fields that the inner one lacks where a caller says `outer=True`. A field that is None is absent.
    """

    def __init__(self, config: object) -> None:
        self._outer = config
        nested = _get(config, "text_config")
        self._text = config if nested is None else nested
        self.family = str(self.value("model_type", outer=True) or "model without model_type")

    def value(self, *names: str, outer: bool = False) -> object:
        """The first of these fields that is there, else None."""
        for source in (self._text, self._outer) if outer else (self._text,):
            for name in names:
                found = _get(source, name)
                if found is not None:
                    return found
        return None

    def count(self, *names: str) -> int:
        """The first of these fields that is there, a positive whole number. Raises ManifestError for anything else."""
        value = self.value(*names)
        if value is None:
            raise self.error(f"has no {' or '.join(names)}")
        # bool is an int in Python, and True heads are nonsense.
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limits.MAX_ELEMENTS:
            raise self.error(
                f"has {names[0]} = {shorten(value)}, it must be a whole number from 1 to {limits.MAX_ELEMENTS}"
            )
        return value

    def layer_count(self) -> int:
        """num_hidden_layers. Raises ManifestError where it is no count, or more than any description may hold."""
        count = self.count("num_hidden_layers")
        if count > limits.MAX_LAYERS:
            raise self.error(f"has num_hidden_layers = {count}, at most {limits.MAX_LAYERS} are supported")
        return count

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of words, None if absent. Raises ManifestError for anything else."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise self.error(f"has {name} = {shorten(value)}, it must be a list of names")
        if len(value) > limits.MAX_LAYERS:
            raise self.error(f"has {len(value)} entries in {name}, at most {limits.MAX_LAYERS} are supported")
        return tuple(value)

    def _label(self) -> str:
        """The family in a message, as it is or, where somebody else's text cannot be shown, quoted and cut."""
        return self.family if self.family.isprintable() and len(self.family) <= _SHOWN else shorten(self.family)

    def error(self, fault: str, remedy: str = _REMEDY) -> ManifestError:
        """What to raise for this configuration: `fault` completes "the configuration"."""
        return ManifestError(f"{self._label()}: the model's configuration {fault}; {remedy}")


class Nested(Fields):
    """A mapping inside a configuration, for example `linear_attn_config`; its errors name both."""

    def __init__(self, parent: Fields, name: str) -> None:
        content = parent.value(name)
        if content is None:
            raise parent.error(f"has no {name}")
        self._outer = self._text = content
        self.family, self._name = parent.family, name

    def error(self, fault: str, remedy: str = _REMEDY) -> ManifestError:
        """Like Fields.error, for the nested mapping."""
        return ManifestError(f"{self._label()}: {self._name} in the model's configuration {fault}; {remedy}")

    def layer_numbers(self, name: str) -> frozenset[int] | None:
        """A list of layer numbers counted from 1, None if absent. Raises ManifestError for anything else."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(number) is int for number in value):
            raise self.error(f"has {name} = {shorten(value)}, it must be a list of layer numbers")
        return frozenset(value)


def _get(source: object, name: str) -> object:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
