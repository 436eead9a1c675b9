"""The `beta` of generalised Jensen-Shannon divergences, as TRL and Liger have it: which kind it stands for."""

from __future__ import annotations

from typing import Any

ENDS: dict[float, tuple[str, dict[str, Any]]] = {0.0: ("kl", {}), 1.0: ("reverse_kl", {})}


def kind_of(beta: float, name: str = "beta") -> tuple[str, dict[str, Any]]:
    """A kind and its parameter: 0 is kl, 1 is reverse_kl, and what lies between is jensen_shannon of that beta.

    The divergence is beta · KL(p ‖ m) + (1 - beta) · KL(q ‖ m) of the teacher's p and the student's q. m is
    beta · p + (1 - beta) · q. At its ends it would be 0, so that libraries take what it tends to over beta (1 - beta).
    Source: Agarwal et al., On-Policy Distillation of Language Models, arXiv 2306.13649, section 2.

    >>> from kullback.integrations.beta import kind_of
    >>> kind_of(0), kind_of(0.3)
    (('kl', {}), ('jensen_shannon', {'beta': 0.3}))
    """
    if not 0 <= float(beta) <= 1:
        raise ValueError(f"{name} must lie from 0 to 1; got {beta}")
    return ENDS.get(float(beta), ("jensen_shannon", {"beta": float(beta)}))
