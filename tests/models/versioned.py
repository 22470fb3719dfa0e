"""A module whose weights have a version."""

from torch import nn


class Versioned(nn.Linear):
    """Refuses weights of an unknown version, as torchvision's MNASNet; version 1 held the weight negated."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, metadata, *rest):
        version = metadata.get("version")
        if version not in (1, 2):
            raise ValueError(f"version should be 1 or 2, got {version}")
        if version == 1:
            state_dict[f"{prefix}weight"] = -state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


class Old(Versioned):
    """The version of the module before the present one, whose state dicts are of version 1."""

    _version = 1

    def _load_from_state_dict(self, *arguments):
        nn.Linear._load_from_state_dict(self, *arguments)
